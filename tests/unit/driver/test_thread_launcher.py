"""What all launchers share: a thread for each slot, which posts the slot's end, and the cancelling of the rest."""

from __future__ import annotations

import queue
import threading

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.driver.thread_launcher import SlotOutcome, ThreadPerSlotLauncher
from spark_elastic.protocol.events import DriverEvent, LaunchEnded
from spark_elastic.protocol.slot_spec import SlotSpec


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


def test_the_end_of_a_slot_is_posted_with_its_launch() -> None:
    slots = Slots()
    slots.launch(7)
    slots.released.set()
    end = slots.posted.get(timeout=20.0)
    assert isinstance(end, LaunchEnded)
    assert (end.launch, end.reason, end.cancelled, end.executor_lost) == (7, "released", False, True)
    assert slots.close(1.0) == []
    assert slots.cancels == 0


def test_a_slot_that_could_not_be_started_ends_with_the_error() -> None:
    class FailingSlots(Slots):
        def run_slot(self, launch: int) -> SlotOutcome:
            raise UnicodeError("label too long")

    slots = FailingSlots()
    slots.launch(2)
    end = slots.posted.get(timeout=20.0)
    assert isinstance(end, LaunchEnded)
    assert end.reason == "it could not be started: UnicodeError: label too long"


@pytest.mark.parametrize("fails", ["start", "__init__"])  # that of Spark's threads asks the JVM
def test_a_slot_whose_thread_cannot_start_is_launched_again_by_the_driver(fails: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    class SlotsInFullProcess(Slots):
        thread_class = type("FullProcess", (threading.Thread,), {fails: refuse})

    slots = SlotsInFullProcess()
    slots.launch(2)
    end = slots.posted.get(timeout=20.0)
    assert isinstance(end, LaunchEnded)
    assert end.reason == "it could not be started: RuntimeError: can't start new thread"
    assert slots.close(1.0) == []


def test_close_cancels_running_slots_until_they_end_and_posts_nothing() -> None:
    slots = Slots()
    slots.launch(1)
    assert slots.close(30.0 * slots.grace) == []
    assert slots.cancels == 2
    assert slots.posted.empty()


def test_close_names_the_slots_that_do_not_end() -> None:
    slots = Slots()
    slots.ignores_cancels = True
    slots.launch(3)
    assert slots.close(0.6) == ["slot launch 3"]
    slots.released.set()
