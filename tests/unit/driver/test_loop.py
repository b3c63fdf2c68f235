"""The driver's loop and its queue: heartbeats wait for the next other event, and nothing overtakes anything."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.driver.journal import Journal
from spark_elastic.driver.loop import DriverLoop, EventQueue
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.commands import DriverCommand, End, JobOutcome, LaunchSlot
from spark_elastic.protocol.events import CancelRequested, DriverEvent, Received
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import Limits, SlotId

BEAT = Received(1.0, Heartbeat(SlotId("1-0"), "", ""))
CANCEL = CancelRequested(2.0, "enough")


class WaitedEvent(threading.Event):
    """Says whether somebody has come to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited.set()
        return super().wait(timeout)


def test_events_keep_their_order() -> None:
    inbox = EventQueue()
    for event in (BEAT, CANCEL, BEAT, None):
        inbox.put(event)
    assert [inbox.get(5.0) for _ in range(4)] == [BEAT, CANCEL, BEAT, None]
    with pytest.raises(queue.Empty):
        inbox.get(0.0)


@pytest.mark.parametrize(("event", "woken"), [(BEAT, False), (CANCEL, True), (None, True)])
def test_a_heartbeat_does_not_wake_the_loop(event: Heartbeat | CancelRequested | None, woken: bool) -> None:
    inbox, bell, taken = EventQueue(), WaitedEvent(), threading.Event()
    inbox._wakeup = bell

    def take() -> None:
        inbox.get(30.0)
        taken.set()

    reader = threading.Thread(target=take)
    reader.start()
    assert bell.awaited.wait(10.0)
    inbox.put(event)
    assert taken.wait(0.2 if not woken else 10.0) is woken
    inbox.put(CANCEL)
    reader.join()


def make(
    done: list[DriverCommand], limits: Limits, journal: Journal | None = None
) -> tuple[DriverLoop, EventQueue]:
    inbox: EventQueue = EventQueue()
    initial = driver_machine.initial(limits, 1)
    return DriverLoop(initial, inbox, done.append, SystemClock(), journal or Journal()), inbox


def test_the_driver_loop_executes_the_first_commands_and_the_end() -> None:
    done: list[DriverCommand] = []
    heard: list[DriverEvent] = []
    loop, _ = make(done, Limits(2, 1, 2), Journal(listener=lambda event, *more: heard.append(event)))
    loop.start()
    loop.cancel("enough")
    end = loop.wait(5)
    loop.close()
    assert end is not None
    assert end.outcome is JobOutcome.CANCELLED
    assert [type(c) for c in done[:2]] == [LaunchSlot, LaunchSlot]
    assert any(isinstance(event, CancelRequested) and event.reason == "enough" for event in heard)


def test_ticks_are_taken_although_the_queue_is_never_empty() -> None:
    """A deadline is met although an event is always waiting."""
    done: list[DriverCommand] = []
    loop, inbox = make(done, Limits(1, 1, 1, start_timeout=0.3))
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            inbox.put(Received(time.monotonic(), Heartbeat(SlotId("9-0"))))
            time.sleep(0.0005)

    thread = threading.Thread(target=flood)
    thread.start()
    loop.start()
    end = loop.wait(10)
    stop.set()
    thread.join()
    loop.close()
    assert end is not None
    assert end.outcome is JobOutcome.NOT_ENOUGH_WORKERS


def test_an_exception_in_a_command_ends_the_job(caplog: pytest.LogCaptureFixture) -> None:
    inbox: EventQueue = EventQueue()

    def raise_error(command: DriverCommand) -> None:
        raise RuntimeError("no room")

    loop = DriverLoop(
        driver_machine.initial(Limits(1, 1, 1), 1), inbox, raise_error, SystemClock(), Journal()
    )
    loop.start()
    end = loop.wait(5)
    inbox.put(CancelRequested(0.0, "too late"))
    loop.close()
    assert isinstance(end, End)
    assert end.outcome is JobOutcome.DEFECT
    assert "no room" in end.reason
    assert "the driver loop failed" in caplog.text
