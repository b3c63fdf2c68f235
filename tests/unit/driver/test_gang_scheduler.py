from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Any
from unittest.mock import Mock

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.driver.gang_scheduler import GangScheduler, JobQueue, QueueTimeout
from spark_elastic.errors import NotEnoughWorkers
from spark_elastic.protocol.events import DriverEvent, SlotsWanted
from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fakes import FakeClock

LIMITS = Limits(2, 2, 2, gather_timeout=0.05, start_timeout=20.0)
CLOCK = SystemClock()


@contextmanager
def _enter_queue(queue: JobQueue, name: str, limits: Limits = LIMITS) -> Iterator[GangScheduler]:
    turn = GangScheduler(queue, name, limits, CLOCK)
    with turn.alive_lock, turn:
        yield turn


def test_r17_one_job_gathers_at_a_time() -> None:
    queue = JobQueue()
    entered = threading.Event()

    def enter_second() -> None:
        with _enter_queue(queue, "second"):
            entered.set()

    with _enter_queue(queue, "first") as first:
        thread = threading.Thread(target=enter_second)
        thread.start()
        assert not entered.wait(0.2)
        first.finish_gathering()  # its world is formed; it runs beside the next job
        assert entered.wait(10.0)
        thread.join(10.0)
    with pytest.raises(ValueError), _enter_queue(queue, "third"):
        raise ValueError  # which ends its turn
    with _enter_queue(queue, "fourth"):
        assert len(queue.jobs) == 1
    assert not queue.jobs


@pytest.mark.parametrize("where", ["__exit__", "_leave", "finish_gathering"])
def test_r17_a_job_that_is_interrupted_leaves_the_queue(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    queue = JobQueue()
    with monkeypatch.context() as patched:
        patched.setattr(GangScheduler, where, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), _enter_queue(queue, "first") as first:
            first._trains = True
    assert queue.find_training_job() is None
    with _enter_queue(queue, "second", replace(LIMITS, start_timeout=0.1)):
        pass


def test_r17_a_job_that_is_interrupted_as_its_turn_begins_leaves_the_queue() -> None:
    class Interrupted(Condition):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if queue.gathering is first and first in queue.jobs:
                raise KeyboardInterrupt

    queue = JobQueue()
    first = GangScheduler(queue, "first", LIMITS, CLOCK)
    queue.condition = Interrupted()
    with pytest.raises(KeyboardInterrupt), first.alive_lock, first:
        pass
    with _enter_queue(queue, "second", replace(LIMITS, start_timeout=0.1)):
        pass


def test_r17_a_job_that_waits_too_long_fails_with_the_name_of_the_first() -> None:
    queue = JobQueue()
    with _enter_queue(queue, "first"):
        late = GangScheduler(queue, "second", replace(LIMITS, start_timeout=0.1), CLOCK)
        told = "while job first of the same application was gathering"
        with pytest.raises(NotEnoughWorkers, match=told), late.alive_lock, late:
            pass
        assert len(queue.jobs) == 1


def test_r17_slots_are_given_back_if_other_jobs_wait_and_there_is_no_world() -> None:
    queue = JobQueue()
    posted: SimpleQueue[DriverEvent] = SimpleQueue()
    with _enter_queue(queue, "first") as first:
        first.finish_gathering()
        with _enter_queue(queue, "second") as second:
            second.start(posted.put)
            event = posted.get(timeout=10.0)
            assert isinstance(event, SlotsWanted)
            assert "job first" in event.reason
            second.close()


@pytest.mark.parametrize("waiting", [False, True])
def test_r17_a_job_alone_keeps_its_slots_and_those_that_wait_take_none(waiting: bool) -> None:
    queue = JobQueue()
    posted: SimpleQueue[DriverEvent] = SimpleQueue()
    with _enter_queue(queue, "only") as turn:
        if waiting:
            queue.jobs.append(GangScheduler(queue, "waits", LIMITS, CLOCK))
        turn.start(posted.put)
        with pytest.raises(Empty):
            posted.get(timeout=0.3)
        turn.close()


def test_r17_no_time_is_counted_while_another_job_trains(caplog: pytest.LogCaptureFixture) -> None:
    queue, clock = JobQueue(), FakeClock()
    timeout = QueueTimeout(queue, 600.0, clock, "the next")
    with _enter_queue(queue, "first") as first:
        clock.advance(599.0)
        assert not timeout.is_expired()
        first.finish_gathering()
        for _ in range(10):
            clock.advance(599.0)
            assert not timeout.is_expired()
    clock.advance(599.0)
    assert not timeout.is_expired()
    clock.advance(1.0)
    assert timeout.is_expired()
    assert [record.getMessage() for record in caplog.records] == [
        "the next waits while job first of the same application trains: cancel its Spark jobs to end that"
    ]


def test_r17_after_a_loss_later_jobs_give_their_slots_to_the_first() -> None:
    queue, clock = JobQueue(), FakeClock()
    first, second, third = (GangScheduler(queue, name, LIMITS, clock) for name in ("a", "b", "c"))
    with ExitStack() as jobs:
        for turn in (first, second, third):
            jobs.enter_context(turn.alive_lock)
            jobs.enter_context(turn)
            turn.finish_gathering()
        first.report_shortage(True)
        third.report_shortage(True)
        assert third.find_slot_claim() is None, "it may find its next world at once"
        clock.advance(LIMITS.gather_timeout)
        assert first.find_slot_claim() == ("b", True)
        assert second.find_slot_claim() is None
        assert third.find_slot_claim() == ("a", False)
        first.report_shortage(False)
        assert third.find_slot_claim() == ("a", True)
