"""A step of the whole world: as one process takes it, whole or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.modes import OneBucketMode
from spark_elastic.gradients.step_summary import count_summary_bytes
from spark_elastic.protocol.types import START, MembershipVersion, Phase, Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.step import GradientScaling
from spark_elastic.training.trainer import StepCall, defer_interrupts
from tests.unit.torch.train.trainees import NEXT, ROWS, TrainedModel, X, Y, have_equal_values, train_plain
from tests.unit.torch.worlds import run_in_world

NET = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
NORMED = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def divide_rows(group: Group) -> range:
    return range(ROWS * group.rank // group.size, ROWS * (group.rank + 1) // group.size)


@pytest.mark.parametrize("one_bucket", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_r08_a_world_of_any_size_takes_the_step_of_one_process(size: int, one_bucket: bool) -> None:
    """12 ranks for 10 rows: two have none."""

    def work(group: Group) -> tuple[nn.Module, str, Any]:
        trainee = TrainedModel(NET, one_bucket=one_bucket)
        trainee.take(group, divide_rows(group))
        decision = trainee.take(group, divide_rows(group))
        assert isinstance(trainee.exchange.mode, OneBucketMode) == (one_bucket and size > 1)
        trainee.exchange.close()
        return trainee.model, trainee.state.digest(), decision

    done = run_in_world(size, work)
    assert len({digest for _, digest, _ in done}) == 1
    assert done[0][2].rows == ROWS
    assert done[0][2].denominator == ROWS
    assert have_equal_values(done[0][0], train_plain(NET, 2))


@pytest.mark.parametrize("one_bucket", [False, True])
def test_r08_unused_and_frozen_parameters_are_left_alone(one_bucket: bool) -> None:
    """Weight decay moves whatever has a gradient, be it zero."""

    class NetWithUnusedLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(5, 3).double() for _ in range(3))
            self.tied = self.used
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x) + self.tied(x) + self.frozen(x)

    model = NetWithUnusedLayer()

    def work(group: Group) -> nn.Module:
        trainee = TrainedModel(model, one_bucket=one_bucket)
        trainee.take(group, divide_rows(group))
        assert trainee.model.unused.weight.grad is None  # type: ignore[union-attr]
        trainee.exchange.close()
        return trainee.model

    replicas = run_in_world(2, work)
    assert all(have_equal_values(replica, train_plain(model)) for replica in replicas)


def test_r09_running_statistics_are_the_same_on_all_ranks() -> None:
    def work(group: Group) -> dict[str, Any]:
        trainee = TrainedModel(NORMED, batch_size=ROWS)
        trainee.take(group, range(4) if group.rank == 0 else range(4, ROWS))
        trainee.exchange.close()
        return dict(trainee.model.named_buffers())

    first, second = run_in_world(2, work)
    hidden = NORMED[0](X).detach()
    mean = 0.1 * (hidden[:4].mean(0) * 0.4 + hidden[4:].mean(0) * 0.6)
    assert torch.allclose(first["1.running_mean"], mean, rtol=0, atol=1e-12)
    assert int(first["1.num_batches_tracked"]) == 1
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_r09_dropout_differs_by_rank_and_generators_stay_equal() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3).double())

    def masks(own_rank: int) -> list[torch.Tensor]:
        class WorldOfOne:
            rank, size, fence = own_rank, 1, (1, 1)

            def allgather(self, array: Any) -> Any:
                return array[None]

        trainee = TrainedModel(model, batch_size=ROWS)
        seen: list[torch.Tensor] = []
        trainee.model[0].register_forward_hook(lambda module, given, out: seen.append(out == 0))  # type: ignore[index]
        for _ in range(2):
            trainee.take(WorldOfOne(), range(ROWS))  # type: ignore[arg-type]
        trainee.exchange.close()
        return seen

    generator = torch.get_rng_state()
    first, second, again = masks(0), masks(1), masks(0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_r02_a_rank_writes_its_ledger_before_it_sends_a_bucket() -> None:
    trainee = TrainedModel(NET)
    seen: list[list[str]] = []

    def work(group: Group) -> None:
        class Watching:
            rank, size, fence = group.rank, 2, group.fence
            allgather, buffer, abort = group.allgather, group.buffer, group.abort

            def allreduce(self, array: Any, *what: Any, **how: Any) -> None:
                seen.append(list(trainee.ledger.lines))
                group.allreduce(array, *what, **how)

        if group.rank == 0:
            trainee.take(Watching(), divide_rows(group))  # type: ignore[arg-type]
            trainee.exchange.close()
        else:
            other = TrainedModel(NET)
            other.take(group, divide_rows(group))
            other.exchange.close()

    run_in_world(2, work)
    assert seen
    assert all(lines == ["contributes [0, 1, 2, 3, 4]"] for lines in seen)
    assert trainee.ledger.lines[-1] == "applied"


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("at", range(5))
def test_r01_r03_a_step_that_breaks_changes_nothing_and_can_be_taken_again(at: int, carries: bool) -> None:
    """It breaks at the layout's hash (0), at an allreduce on its way (bucket, then buffers), or at the trailer (4). If
    the bucket carries the trailer: as the ranks agree on that (0), at the buffers, at the hash, at the bucket (4)."""
    model = nn.Sequential(NORMED, nn.Dropout(0.5), nn.Linear(3, 3).double())

    def work(group: Group) -> None:
        trainee = TrainedModel(model)
        trainee.exchange.close()
        count = count_summary_bytes if carries else None
        trainee.exchange = GradientExchange(trainee.model.named_parameters(), count_message_bytes=count)
        trainee.taker._exchange = trainee.exchange

        class Breaking:
            rank, size, fence = 0, 2, (1, 1)
            calls = 0

            def buffer(self, nbytes: int) -> Any:
                return np.zeros(nbytes, np.uint8)

            def allreduce(self, array: Any, op: str = "sum", **how: Any) -> None:
                array.fill(7)
                self._call()

            def allgather(self, array: Any) -> Any:
                self._call()
                return np.stack([array, array])

            def abort(self, reason: str) -> None: ...

            def _call(self) -> None:
                self.calls += 1
                if self.calls > at:
                    raise CollectiveError((1,), "broken for the test")

        torch.manual_seed(3)
        before, draws = trainee.state.digest(), torch.get_rng_state()
        with pytest.raises(CollectiveError, match="broken for the test"):
            trainee.take(Breaking(), range(5))  # type: ignore[arg-type]
        assert trainee.state.digest() == before
        assert trainee.state.position == START
        assert torch.equal(torch.get_rng_state(), draws)
        assert "applied" not in trainee.ledger.lines
        trainee.take(group, range(ROWS))
        torch.manual_seed(3)
        undisturbed = TrainedModel(model)
        undisturbed.take(group, range(ROWS))
        assert trainee.state.digest() == undisturbed.state.digest()
        trainee.exchange.close()
        undisturbed.exchange.close()

    run_in_world(1, work)


def test_r03_an_exception_of_the_users_with_buckets_under_way_is_drained() -> None:
    """A hook raises while the first bucket waits for a peer: the next step must not share its memory."""
    trainees = [TrainedModel(NET, batch_size=ROWS) for _ in range(2)]

    def break_step(group: Group) -> None:
        if group.rank == 0:
            handle = trainees[0].model[0].weight.register_post_accumulate_grad_hook(_raise)  # type: ignore[index]
            with pytest.raises(ZeroDivisionError):
                trainees[0].take(group, range(5))
            handle.remove()
            assert trainees[0].exchange.mode.has_launched_buckets

    def take_step(group: Group) -> None:
        trainees[group.rank].take(group, divide_rows(group))

    run_in_world(2, break_step)
    run_in_world(2, take_step, generation=2)
    for trainee in trainees:
        assert have_equal_values(trainee.model, train_plain(NET))
        trainee.exchange.close()


def _raise(parameter: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("one_bucket", [False, True])
def test_r06_ranks_at_different_positions_refuse_to_step(one_bucket: bool) -> None:
    def work(group: Group) -> None:
        trainee = TrainedModel(NET, one_bucket=one_bucket)
        trainee.state.position = Position(0, Phase.TRAIN, group.rank)
        before = trainee.state.digest()
        with pytest.raises(CollectiveError):
            trainee.take(group, divide_rows(group))
        assert trainee.state.digest() == before
        trainee.exchange.close()

    run_in_world(2, work)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises; a shell starts what it puts into the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_r01_an_interrupt_waits_for_the_end_of_the_apply_section() -> None:
    assert threading.current_thread() is threading.main_thread()
    through = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the interrupt comes at the block's end
        with defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            through = True
    assert through
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_fp16_is_refused_where_torch_has_no_scaler_for_cpus_and_all_else_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch 2.2 is."""
    monkeypatch.delattr(torch.amp, "GradScaler")
    says = r"precision='fp16' needs torch 2\.3 or newer, and this is .* to 'bf16'"
    with pytest.raises(InvalidInput, match=says):
        GradientScaling("fp16")
    for scaling in (GradientScaling("bf16"), GradientScaling()):
        assert scaling.state_dict() == {"scaler": {}, "skipped": 0}


@pytest.mark.parametrize("size", [1, 2])
def test_p4_callbacks_see_the_buffers_of_the_step_that_is_finalized(size: int) -> None:
    """They are told of it after the forward pass of the next one, which writes each rank's own."""

    def work(group: Group) -> tuple[list[Any], list[Any], nn.Module]:
        trainee = TrainedModel(NORMED, batch_size=ROWS)
        trainee.taker.shows_buffers = True
        seen, after = [], []
        rows = divide_rows(group)
        part = slice(rows.start, rows.stop)
        batch = LocalBatch(ROWS, np.array(rows), (X[part],), (Y[part],), None)
        tell = lambda: seen.append(read(trainee))  # noqa: E731
        for _ in range(3):
            call = StepCall(group, MembershipVersion(), lambda decision: NEXT, tell)
            trainee.taker.run(batch, call)
            after.append(read(trainee))
        trainee.exchange.close()
        return seen, after, trainee.model

    def read(trainee: TrainedModel) -> list[Any]:
        return [buffer.tolist() for buffer in trainee.model.buffers()]

    for seen, after, model in run_in_world(size, work):
        assert seen == [[buffer.tolist() for buffer in NORMED.buffers()], *after[:-1]]
        if size == 1:
            assert have_equal_values(model, train_plain(NORMED, 3))
