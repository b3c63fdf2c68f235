"""What all launchers share: a thread for each slot, which posts the slot's end, and the cancelling of the rest.

The coordinator's launcher: requests and events; a client that is silent for too long ends the job.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.coordinator import ChannelEnd, ClientCall, RemoteLauncher, StoreChannel
from spark_elastic.driver.ports import SlotOutcome, ThreadPerSlotLauncher
from spark_elastic.protocol.events import CancelRequested, DriverEvent, LaunchEnded, SlotsWanted
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


class Slots(ThreadPerSlotLauncher):
    """Slots that run until they are released, or cancelled for the second time."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.released = threading.Event()
        self.cancels = 0
        self.ignores_cancels = False
        self.posted: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
        self.start(SlotSpec(address="", key=b"", attempt=1), self.posted.put)

    def run_slot(self, launch: int) -> SlotOutcome:
        assert self.released.wait(60.0)
        return SlotOutcome("released", executor_lost=True)

    def cancel(self) -> None:
        self.cancels += 1
        if self.cancels > 1 and not self.ignores_cancels:
            self.released.set()


def wait_for_end(slots: Slots, launch: int) -> LaunchEnded:
    slots.launch(launch)
    end = slots.posted.get(timeout=20.0)
    assert isinstance(end, LaunchEnded)
    assert end.launch == launch
    return end


def test_the_end_of_a_slot_is_posted_with_its_launch() -> None:
    slots = Slots()
    slots.released.set()
    end = wait_for_end(slots, 7)
    assert (end.reason, end.cancelled, end.executor_lost) == ("released", False, True)
    assert slots.close(1.0) == []
    assert slots.cancels == 0


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("fails", ["run_slot", "start", "__init__"])  # that of Spark's threads asks the JVM
def test_a_slot_that_could_not_be_started_ends_with_the_error(fails: str) -> None:
    """The driver launches it again."""
    parts = {"thread_class": type("FullProcess", (threading.Thread,), {fails: refuse})}
    slots = type("FailingSlots", (Slots,), {fails: refuse} if fails == "run_slot" else parts)()
    assert wait_for_end(slots, 2).reason == "it could not be started: RuntimeError: can't start new thread"
    assert slots.close(1.0) == []


def test_close_cancels_running_slots_until_they_end_and_names_those_that_do_not() -> None:
    slots, stuck = Slots(), Slots()
    slots.launch(1)
    assert slots.close(9.0 * slots.grace) == []
    assert slots.cancels == 2
    assert slots.posted.empty()
    stuck.ignores_cancels = True
    stuck.launch(3)
    assert stuck.close(0.6) == ["slot launch 3"]
    stuck.released.set()


def test_requests_reach_the_client_and_its_events_the_driver() -> None:
    store, clock = make_memory_store(), FakeClock()
    requests: list[Any] = []
    events: list[Any] = []
    client = StoreChannel(
        ChannelEnd(store, "m", b"key", "client", "task"), [ClientCall], requests.append, clock
    )
    launcher = RemoteLauncher(ChannelEnd(store, "m", b"key", "task", "client"), clock, 60.0)
    launcher.start(SlotSpec(address="10.0.0.1:7", key=b"key", attempt=1), events.append)
    launcher.launch(3)
    for event in (
        LaunchEnded(7.0, 3, "lost", False, True),
        SlotsWanted(7.0, "others", True),
        CancelRequested(7.0, "stop"),
    ):
        client.send(event)
    client.poll()
    assert launcher.close(20.0) == []  # returns once launch 3 has ended
    launcher.channel.close(10.0)
    client.poll()
    started = ClientCall("client", "on_started", ("10.0.0.1:7", None))
    assert requests == [started, ClientCall("launcher", "launch", (3,))]
    assert events == [
        LaunchEnded(clock.now(), 3, "lost", False, True),
        SlotsWanted(clock.now(), "others", True),
        CancelRequested(clock.now(), "stop"),
    ]


def test_a_silent_client_ends_the_job() -> None:
    clock = FakeClock()
    cancelled = threading.Event()
    events: list[Any] = []

    def post(event: Any) -> None:
        events.append(event)
        cancelled.set()

    launcher = RemoteLauncher(ChannelEnd(make_memory_store(), "m", b"key", "task", "client"), clock, 60.0)
    launcher.start(SlotSpec(address="10.0.0.1:7", key=b"key", attempt=1), post)
    clock.advance(61)
    assert cancelled.wait(20)
    launcher.close(5.0)
    launcher.channel.close(10.0)
    assert [type(event) for event in events] == [CancelRequested]
    assert "has sent nothing for 61 s" in events[0].reason
