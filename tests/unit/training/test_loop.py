"""How a worker of an estimator comes by the state of its world, and what its validation says of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_collectives import CollectiveError
from spark_elastic.data.plan import DataPlan
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.runs.checkpoint import CheckpointStore, SnapshotReader
from spark_elastic.runs.snapshot import PickleCodec
from spark_elastic.training import loop as module
from spark_elastic.training.loop import TrainingLoop
from spark_elastic.training.progress import TrainingProgress
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
        loop._mark, loop._commits = lambda *given: None, None
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
