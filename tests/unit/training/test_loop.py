"""A worker's loop: how it comes by its world's state, its part of a step, and what its history says of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_collectives import CollectiveError
from spark_elastic.data.plan import DataPlan
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.protocol.types import INITIAL_VERSION, Checkpoint, Fence, Phase, Position
from spark_elastic.runs.checkpoint import CheckpointStore, SnapshotReader
from spark_elastic.runs.snapshot import PickleCodec
from spark_elastic.testing import FakeClock
from spark_elastic.training import loop as module
from spark_elastic.training.batch import Arrays, LocalBatch, StepMetrics
from spark_elastic.training.loop import TrainingLoop
from spark_elastic.training.progress import StepSums, TrainingProgress, select_figures, to_json_values
from spark_elastic.training.step_commits import StepCommits
from tests.memory_store import make_memory_store

KEPT = Position(2, Phase.TRAIN, 7)
GROUP: Any = SimpleNamespace(rank=0, fence=(1, 1))


def checkpoint(generation: int) -> Checkpoint:
    return Checkpoint(Fence(1, generation), KEPT, "c", "digest")


def resumes(*candidates: Checkpoint) -> Any:
    return SimpleNamespace(source=0, resume=candidates, receives=False)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Checkpoint]:
    done: list[Checkpoint] = []

    def read_first_undamaged(
        store: object, candidates: tuple[Checkpoint, ...]
    ) -> tuple[Checkpoint, dict[str, bytes]]:
        done.append(*candidates)
        return candidates[0], {"values": PickleCodec().dumps({}), "memory": b""}

    monkeypatch.setattr(CheckpointStore, "read_first_undamaged", read_first_undamaged)
    return done


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Exception | Position]], TrainingLoop]:
    """Builds a loop from the outcomes of its syncs, one after the other."""

    def build(outcomes: list[Exception | Position]) -> TrainingLoop:
        def sync(*given: object) -> Position:
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(module, "sync_state", sync)
        trainer: Any = SimpleNamespace(move_to_device=lambda: None)
        loop: Any = TrainingLoop(SimpleNamespace(), trainer)  # type: ignore[arg-type]
        loop._snapshot_reader = SnapshotReader(make_memory_store(), "r", PickleCodec())
        loop._state = SimpleNamespace(load=lambda snapshot: None, position=KEPT)
        loop._callbacks = SimpleNamespace(on_fit_begin=lambda group: None)
        loop._mark, loop._commits = lambda *given: None, StepCommits(None, FakeClock())
        built: TrainingLoop = loop
        return built

    return build


def test_p7_a_checkpoint_is_read_once_for_worlds_that_fail(reads: list[Checkpoint], training: Any) -> None:
    """Another one is read, as is the same one after its hand-over."""
    late = CollectiveError((1,), "timed out")
    loop = training([late, late, KEPT, late, KEPT, KEPT])
    for number, outcome in ((3, late), (3, late), (3, KEPT), (3, late), (4, KEPT), (4, KEPT)):
        if outcome is late:
            has_state = loop.position() is not None
            with pytest.raises(CollectiveError):
                loop.sync(resumes(checkpoint(number)), GROUP)
            assert (loop.position() is not None) == has_state, "it holds nothing before all do"
        else:
            assert loop.sync(resumes(checkpoint(number)), GROUP) == KEPT
    assert reads == [checkpoint(number) for number in (3, 3, 4, 4)]


@pytest.mark.parametrize("is_over", [False, True])
def test_r23_the_state_is_kept_before_all_leave_a_world(training: Any, is_over: bool) -> None:
    loop, done = training([]), []
    loop._spec = SimpleNamespace(checkpoints=None)
    loop._trainer.move_to_device = loop._warn_of_dependence = loop._callbacks.on_world_begin = lambda *given: (
        None
    )
    loop._make_balancer = lambda group: None
    keep = lambda state, at_once=False: done.append(("kept", at_once))  # noqa: E731
    loop._commits = SimpleNamespace(begin_world=lambda world: done.append("begins"), keep=keep)
    loop._run_epochs = lambda *given: done.append("stops") or is_over
    loop._finish = lambda group: done.append("finishes")
    loop.run(SimpleNamespace(), GROUP, SimpleNamespace())
    assert done == ["begins", "stops", ("kept", True), *(["finishes"] if is_over else [])]


@pytest.mark.parametrize(
    ("rows", "shares", "balances"), [(8, 0, True), (4, 0, True), (3, 0, False), (8, 2, False)]
)
def test_more_ranks_than_parts_share_equally(training: Any, rows: int, shares: int, balances: bool) -> None:
    loop = training([])
    plan = DataPlan((100,), rows, seed=0, lanes=1, shares=shares)
    loop._spec = SimpleNamespace(plan=plan, config=SimpleNamespace(world=SimpleNamespace(balance_rows=True)))
    balancer = loop._make_balancer(SimpleNamespace(size=4))
    assert (balancer is not None) == balances
    for _ in range(20 * balances):
        balancer.add([0.3, 0.1, 0.1, 0.1])


def numbers(*steps: tuple[float, float], has_weight: bool = True) -> dict[str, Any]:
    """steps: their (sum of losses, denominator); ten rows each."""
    loop: Any = object.__new__(TrainingLoop)
    loop._state = SimpleNamespace(position=Position(0, Phase.CLOSE, 0), progress=TrainingProgress())
    loop._trainer = SimpleNamespace(epoch_metrics=dict)
    loop._spec = SimpleNamespace(plan=SimpleNamespace(count_rows_before=lambda steps: 0))
    loop._validation = ()
    for loss, denominator in steps:
        decision: Any = SimpleNamespace(loss=loss, denominator=denominator, rows=10, has_weight=has_weight)
        loop._state.progress.validation.add(decision, 1, 0.0)
    return {name: value for name, value in loop._history_entry().items() if name.startswith("val_")}


@pytest.mark.parametrize(
    ("steps", "loss"),
    [
        ([(20.0, 10.0), (10.0, 10.0)], 1.5),
        ([(0.5, 0.25), (0.0, 0.0), (0.0, 0.0), (1.5, 0.75)], 2.0),  # steps whose rows have no weight
        ([(20.0, 0.0), (10.0, 0.0)], 15.0),  # a loss that its user wants summed
        ([(0.0, 0.0), (0.0, 0.0)], 0.0),
    ],
)
def test_validation_computes_the_mean_of_an_epoch(steps: list[tuple[float, float]], loss: float) -> None:
    assert numbers(*steps) == {"val_loss": loss, "val_rows": 10 * len(steps)}
    assert math.isnan(numbers((0.0, 10.0), (0.0, 0.0), has_weight=False)["val_loss"])
    assert numbers((0.0, math.nan), (0.0, math.nan)) == {"val_rows": 20}, "a model without one gets none"


ROWS = np.arange(30.0).reshape(10, 3)


@pytest.mark.parametrize("made", [np.asarray, torch.from_numpy])
def test_micro_batches_hold_every_row_once(made: Callable[[Any], Any]) -> None:
    share = LocalBatch(25, np.arange(10), (made(ROWS),), (made(ROWS[:, 0]),), made(ROWS[:, 1]))
    parts = list(share.micro_batches(4))
    assert [len(part) for part in parts] == [3, 3, 4]
    assert np.array_equal(np.concatenate([part.row_ids for part in parts]), share.row_ids)
    assert np.array_equal(np.concatenate([part.features[0] for part in parts]), ROWS)
    assert np.array_equal(np.concatenate([part.labels[0] for part in parts]), ROWS[:, 0])
    weights = [part.weights for part in parts if part.weights is not None]
    assert np.array_equal(np.concatenate(weights), ROWS[:, 1])
    assert {part.planned for part in parts} == {25}


@pytest.mark.parametrize("made", [np.asarray, torch.from_numpy])
def test_a_batch_has_weight_if_one_of_its_rows_has(made: Callable[[Any], Any]) -> None:
    zeros, some = made(np.zeros(3)), made(np.array([0.0, 0.5, 0.0]))
    batches = [LocalBatch(3, np.arange(3), (), (), each) for each in (zeros, some)]
    assert [each.has_weight for each in batches] == [False, True]
    assert LocalBatch(3, np.arange(3), (), (), zeros, shares=tuple(batches)).has_weight
    assert not LocalBatch(3, np.arange(3), (), (), some, on_host=((), zeros)).has_weight
    assert LocalBatch(3, np.arange(3), (), (), None).has_weight


class Recorder(StepMetrics):
    def _count_rows(self, columns: Arrays) -> None:
        self.counted = columns


def test_neither_a_broken_exchange_nor_a_discard_leaves_rows() -> None:
    def fail(data: bytes) -> list[bytes]:
        raise CollectiveError([1], "gone")

    metrics, echo = Recorder(), SimpleNamespace(allgather_bytes=lambda data: [data, data])
    for number in range(3):
        metrics.add_rows({"loss": (1.5, 3)}, [np.array([10 + number])] if number else None)
        if number == 0:
            with pytest.raises(CollectiveError):
                metrics.gather(SimpleNamespace(allgather_bytes=fail))  # type: ignore[arg-type]
        elif number == 1:
            metrics.discard()
        metrics.gather(echo)  # type: ignore[arg-type]
        metrics.commit()
        assert metrics.sums == ({"loss": (3.0, 6)} if number == 2 else {})
    assert [column.tolist() for column in metrics.counted] == [[12, 12]]


def decision(loss: float, denominator: float = 4.0, rows: int = 4) -> StepDecision:
    none = np.zeros(0, np.bool_)
    return StepDecision(INITIAL_VERSION, rows, loss, denominator, none, none, 0)


def test_an_entry_sums_up_the_steps_of_worlds_of_several_sizes() -> None:
    sums = StepSums()
    sums.add(decision(6.0, 4.0, 4), world_size=2, seconds=0.5)
    sums.add(decision(2.0, 4.0, 4), world_size=3, seconds=0.25)
    sums.add(decision(4.0, 4.0, 3), world_size=2, seconds=0.25)

    entry = {"epoch": 5, "loss": 1.0, "rows": 11, "planned": 12, "steps": 3, "seconds": 1.0, "worlds": [2, 3]}
    assert sums.history_entry(epoch=5, planned=12) == entry
    assert select_figures(entry) == {"loss": 1.0}, "a float, and no time"


def test_the_history_keeps_plain_values() -> None:
    entry = {"a": np.int64(3), "b": np.arange(2), "c": np.float32(0.5)}

    assert to_json_values(entry) == {"a": 3, "b": [0, 1], "c": 0.5}
    with pytest.raises(InvalidInput, match="a callback added a set to logs"):
        to_json_values({"a": {1}})


def test_progress_comes_back_from_its_plain_values() -> None:
    progress = TrainingProgress(history=[{"epoch": 0, "loss": 0.5}], stop_reason="early", has_warned=True)
    progress.epoch.add(decision(6.0, 4.0, 4), world_size=2, seconds=0.5)
    progress.pending_logs = {"epoch": 1, "step": 0}

    values = progress.to_values()

    assert TrainingProgress.from_values(values) == progress
    progress.epoch.add(decision(6.0, 4.0, 4), world_size=3, seconds=0.5)
    assert TrainingProgress.from_values(values) != progress, "the values share something with the progress"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_nan_is_an_error_with_its_step(loss: float) -> None:
    says = rf"the loss became {loss} in step 7 of epoch 3: .* learning rate.*=False continues"
    with pytest.raises(FloatingPointError, match=says):
        decision(loss).check_finite(Position(2, Phase.TRAIN, 7))
    decision(-1e300).check_finite(Position(0, Phase.TRAIN, 0))
