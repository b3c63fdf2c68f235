"""How a worker of an estimator comes by the state of its world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_collectives import CollectiveError
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.training import loop as module
from spark_elastic.training.loop import TrainingLoop

KEPT = Position(2, Phase.TRAIN, 7)
GROUP: Any = SimpleNamespace(rank=0, fence=(1, 1))


def checkpoint(generation: int) -> Checkpoint:
    return Checkpoint(Fence(1, generation), KEPT, "c", "digest")


def resumes(*candidates: Checkpoint) -> Any:
    return SimpleNamespace(source=0, resume=candidates, receivers=(1,))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Checkpoint]:
    done: list[Checkpoint] = []
    monkeypatch.setattr(module, "restore", lambda store, run_id, candidates, state: done.append(*candidates))
    return done


def training(outcomes: list[Exception | Position]) -> TrainingLoop:
    """outcomes: of its hand-overs, one after the other."""

    def sync(*given: object) -> Position:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    spec: Any = SimpleNamespace(checkpoints=SimpleNamespace(run_id="r"), store=None)
    made = TrainingLoop(spec, SimpleNamespace())  # type: ignore[arg-type]
    made._state = SimpleNamespace(sync=sync, position=KEPT)  # type: ignore[assignment]
    made._callbacks = SimpleNamespace(on_fit_begin=lambda group: None)  # type: ignore[assignment]
    made._mark = lambda *given: None  # type: ignore[method-assign]
    return made


def test_p7_a_checkpoint_is_read_once_however_many_worlds_give_up_waiting_for_it(
    reads: list[Checkpoint],
) -> None:
    late = CollectiveError((1,), "timed out")
    loop = training([late, late, KEPT])
    for _ in range(2):
        with pytest.raises(CollectiveError):
            loop.sync(resumes(checkpoint(3)), GROUP)
        assert loop.position() is None, "it holds nothing before all do"
    assert loop.sync(resumes(checkpoint(3)), GROUP) == KEPT
    assert reads == [checkpoint(3)]


def test_p7_another_checkpoint_is_read_and_so_is_the_same_one_once_it_was_handed_on(
    reads: list[Checkpoint],
) -> None:
    loop = training([CollectiveError((1,), "timed out"), KEPT, KEPT])
    with pytest.raises(CollectiveError):
        loop.sync(resumes(checkpoint(3)), GROUP)
    loop.sync(resumes(checkpoint(4)), GROUP)
    loop.sync(resumes(checkpoint(4)), GROUP)
    assert reads == [checkpoint(3), checkpoint(4), checkpoint(4)]
