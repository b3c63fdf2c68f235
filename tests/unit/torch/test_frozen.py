"""Frozen parameters in the snapshots of a `TorchState`: copied once, and taken over by those alone that lack them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import InvalidInput
from spark_elastic.runs.snapshot import Snapshot
from tests.unit.ops.workers import run_in_fake_world, use_context_per_thread


def test_frozen_parameters_are_copied_once_and_what_changes_through_data_each_time() -> None:
    names = "head", "body", "slow"
    model = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.ones(1 << 12)) for n in names})
    model["body"].requires_grad_(False)
    model["slow"].requires_grad_(False)
    state = hvd.elastic.TorchState(model, torch.optim.SGD([model["head"]], lr=0.1))

    def commit() -> Any:
        model["slow"].data.mul_(0.5)  # a moving average, of which no version tells
        state.commit()
        return state._snapshots.wait_for_newest()

    first, second = commit(), commit()
    bodies = [commit.values["model"]["parameters"]["body"].extent for commit in (first, second)]
    assert bodies[0] is bodies[1]
    assert second.memory.nbytes == 2 << 14
    with torch.no_grad():
        model["body"].fill_(9)
        model["slow"].fill_(9)
    state.restore()
    assert (float(model["body"].max()), float(model["slow"].max())) == (1.0, 0.25)
    after = commit()
    assert after.values["model"]["parameters"]["body"].extent is bodies[0]
    assert after.memory.nbytes == 2 << 14


def adapted(base: float) -> tuple[torch.nn.Module, Any]:
    """A model with a frozen base of 400 kB that is made of that number, and its state."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 100), torch.nn.Linear(100, 1))
    torch.nn.init.constant_(model[0].weight, base).requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, hvd.elastic.TorchState(model, torch.optim.SGD(trained, 0.1))


@pytest.mark.parametrize("bases", [(1.0, 1.0), (1.0, 2.0), (1.0, 2.0, 1.0)], ids=["same", "other", "both"])
def test_p4_a_newcomer_takes_a_frozen_base_over_only_if_it_has_made_another(
    bases: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_context_per_thread(monkeypatch)
    sent: list[int] = []  # bytes of each broadcast of the source

    def work(group: Any) -> Any:
        model, state = adapted(bases[group.rank])
        broadcast = group.broadcast

        def watch(array: Any, source: int) -> Any:
            if group.rank == source:
                sent.append(array.nbytes)
            return broadcast(array, source)

        group.broadcast = watch
        if group.rank == 0:
            state.commit()
        state.sync()
        state.commit()
        snapshot = state._snapshots.wait_for_newest()
        (base,) = model[0].weight.unique().tolist()
        return base, len(pickle.dumps(snapshot.values)) > 400_000, snapshot.memory.nbytes

    found = run_in_fake_world(len(bases), work)
    # What ranks make differently is a part of each snapshot that is written.
    differs = len(set(bases)) > 1
    assert found == [(1.0, differs, found[0][2])] * len(bases)
    assert found[0][2] < 10_000
    assert any(nbytes >= 400_000 for nbytes in sent) == differs


def test_p7_a_checkpoint_holds_what_is_trained_and_fits_the_frozen_base_that_it_began_with() -> None:
    _, state = adapted(1.0)
    state.commit()
    snapshot = state._snapshots.wait_for_newest()
    written = pickle.dumps(snapshot.values)
    assert len(written) + snapshot.memory.nbytes < 20_000

    class Reader:
        def read(self, candidates: Any) -> Any:
            return Snapshot(snapshot.position, pickle.loads(written), snapshot.memory)

    model, resumed = adapted(1.0)
    torch.nn.init.zeros_(model[1].weight)
    resumed.restore_checkpoint(Reader(), ())
    assert torch.equal(model[1].weight, state.model[1].weight)
    with pytest.raises(InvalidInput, match=r"frozen parameter '0\.weight' is not the one with which"):
        adapted(2.0)[1].restore_checkpoint(Reader(), ())


def test_what_is_frozen_after_it_was_trained_is_a_part_of_checkpoints() -> None:
    model, state = adapted(1.0)
    state.commit()
    model[1].weight.requires_grad_(False)
    state.commit()
    values = pickle.loads(pickle.dumps(state._snapshots.wait_for_newest().values))["model"]["parameters"]
    assert values["0.weight"].extent.memory is None
    assert values["1.weight"].extent.memory.tobytes() == model[1].weight.numpy().tobytes()
