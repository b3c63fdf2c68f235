from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.driver.gathering import Application, GatherTurn, Patience, Wanted
from spark_elastic.errors import NotEnoughWorkers
from spark_elastic.protocol.events import DriverEvent, SlotsWanted
from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fakes import FakeClock

LIMITS = Limits(2, 2, 2, gather_timeout=0.05, start_timeout=20.0)
CLOCK = SystemClock()


@contextmanager
def _turn(application: Application, name: str, limits: Limits = LIMITS) -> Iterator[GatherTurn]:
    turn = GatherTurn(application, name, limits, CLOCK)
    with turn.lives, turn:
        yield turn


def test_r17_one_job_gathers_at_a_time() -> None:
    application = Application()
    entered = threading.Event()

    def second() -> None:
        with _turn(application, "second"):
            entered.set()

    with _turn(application, "first") as first:
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
        first.gathered()  # its world stands; it goes on beside the next
        assert entered.wait(10.0)
        thread.join(10.0)
    with _turn(application, "third"):
        assert len(application.jobs) == 1


def test_r17_a_job_that_fails_ends_its_turn() -> None:
    application = Application()
    with pytest.raises(ValueError), _turn(application, "first"):
        raise ValueError
    with _turn(application, "second"):
        pass
    assert not application.jobs


@pytest.mark.parametrize("where", ["__exit__", "_leave", "gathered"])
def test_r17_a_job_that_is_interrupted_while_it_ends_keeps_no_turn(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    application = Application()

    def interrupted(self: GatherTurn, *error: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(GatherTurn, where, interrupted)
        with pytest.raises(KeyboardInterrupt), _turn(application, "first") as first:
            first._trains = True
    assert application.training() is None
    with _turn(application, "second", replace(LIMITS, start_timeout=0.1)):
        pass


def test_r17_nor_does_one_that_is_interrupted_as_its_turn_begins() -> None:
    class Interrupted(Condition):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if application.gathering is first and first in application.jobs:
                raise KeyboardInterrupt

    application = Application()
    first = GatherTurn(application, "first", LIMITS, CLOCK)
    application.change = Interrupted()
    with pytest.raises(KeyboardInterrupt), first.lives, first:
        pass
    with _turn(application, "second", replace(LIMITS, start_timeout=0.1)):
        pass


def test_r17_who_waits_too_long_is_told_for_whom() -> None:
    application = Application()
    with _turn(application, "first"):
        late = GatherTurn(application, "second", replace(LIMITS, start_timeout=0.1), CLOCK)
        told = "while job first of the same application was gathering"
        with pytest.raises(NotEnoughWorkers, match=told), late.lives, late:
            pass
        assert len(application.jobs) == 1


def test_r17_slots_are_given_back_while_others_are_there_and_no_world_is() -> None:
    application = Application()
    posted: SimpleQueue[DriverEvent] = SimpleQueue()
    with _turn(application, "first") as first:
        first.gathered()
        with _turn(application, "second") as second:
            second.start(posted.put)
            event = posted.get(timeout=10.0)
            assert isinstance(event, SlotsWanted)
            assert "job first" in event.reason
            second.close()


def test_r17_a_job_alone_keeps_its_slots() -> None:
    posted: SimpleQueue[DriverEvent] = SimpleQueue()
    with _turn(Application(), "only") as turn:
        turn.start(posted.put)
        with pytest.raises(Empty):
            posted.get(timeout=0.3)
        turn.close()


def test_r17_no_time_is_counted_while_another_job_trains(caplog: pytest.LogCaptureFixture) -> None:
    application, clock = Application(), FakeClock()
    patience = Patience(application, 600.0, clock, "the next")
    with _turn(application, "first") as first:
        clock.advance(599.0)
        assert not patience.over()
        first.gathered()
        for _ in range(10):
            clock.advance(599.0)
            assert not patience.over()
    clock.advance(599.0)
    assert not patience.over()
    clock.advance(1.0)
    assert patience.over()
    assert [record.getMessage() for record in caplog.records] == [
        "the next waits while job first of the same application trains: cancel its Spark jobs to end that"
    ]


def test_r17_jobs_that_wait_for_their_turn_take_no_slots_away() -> None:
    application = Application()
    posted: SimpleQueue[DriverEvent] = SimpleQueue()
    with _turn(application, "only") as turn:
        application.jobs.append(GatherTurn(application, "waits", LIMITS, CLOCK))
        turn.start(posted.put)
        with pytest.raises(Empty):
            posted.get(timeout=0.3)
        turn.close()


def test_r17_of_jobs_that_are_short_after_a_loss_the_later_give_way_to_the_first() -> None:
    application, clock = Application(), FakeClock()
    first, second, third = (GatherTurn(application, name, LIMITS, clock) for name in ("a", "b", "c"))
    with ExitStack() as jobs:
        for turn in (first, second, third):
            jobs.enter_context(turn.lives)
            jobs.enter_context(turn)
            turn.gathered()
        first.lacks(True)
        third.lacks(True)
        assert third.wanted() is None, "it may find its next world at once"
        clock.advance(LIMITS.gather_timeout)
        assert first.wanted() == Wanted("b", taken=True)
        assert second.wanted() is None
        assert third.wanted() == Wanted("a", taken=False)
        first.lacks(False)
        assert third.wanted() == Wanted("a", taken=True)
