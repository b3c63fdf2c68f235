"""Bitwise mode on real processes: the weights have one SHA-256 for any number of workers and any loss of them.

tests/faults/test_bitwise.py has hand-written loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from tests.component.injected_faults import inject_faults, kill
from tests.component.threads import run_task
from tests.component.torch.bitwise import BitwiseJob, everything, hash_state
from tests.component.torch.elastic_jobs import compare_rows
from tests.component.torch.job import Follower, LauncherFactory, make_data, train_elastic
from tests.scenarios import Fault
from tests.unit.torch.worlds import run_in_world

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


# Class weights make the divisors of the steps' losses numbers that are not whole.
WEIGHTED = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.1, 0.3]))


@pytest.mark.parametrize(
    ("loss", "scope"),
    [pytest.param(WEIGHTED, None, marks=pytest.mark.faults), (compare_rows, "step")],
    ids=["each row", "rows compared"],
)
def test_the_estimators_weights_and_losses_have_the_same_bits_after_a_kill(
    loss: Any, scope: str | None, tmp_path: Path, fault: Fault
) -> None:
    """Of three workers of which one dies, as those of one process."""
    data = make_data(tmp_path)
    job = BitwiseJob(
        everything(), adam, loss, shape=(1, 6, 6), gradient_clip_norm=0.05, epochs=1, loss_scope=scope
    )
    make = LauncherFactory()

    def kill_one() -> None:
        fault(kill, make.made, max(make.made.slots()))

    with inject_faults(tmp_path / "faults", {"epoch 0": kill_one}):
        weights, result = train_elastic(job, *data, None, Follower(), make)
    assert result.worlds[0].size == 3
    assert len(result.worlds) > 1, "nobody was lost"
    history = json.loads(result.results[0])["history"]
    assert (hash_state(weights), history[0]["loss"].hex()) == train_alone(replace(job, workers=1), data)


def train_alone(job: BitwiseJob, data: tuple[Store, Manifest]) -> tuple[str, str]:
    """In this process: the hash of the weights, and the loss."""
    task, threads = job.task(*data), torch.get_num_threads()
    try:
        (outcome,) = run_in_world(1, lambda group: run_task(task, group))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    history, model = json.loads(outcome.result)["history"], task._trainer.state.model
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return hash_state(weights | dict(model.named_buffers())), history[0]["loss"].hex()
