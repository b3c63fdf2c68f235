from __future__ import annotations

import queue
import signal

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher
from spark_elastic.protocol.events import DriverEvent, LaunchEnded
from spark_elastic.protocol.messages import RegisterSlot
from spark_elastic.protocol.types import SlotSpec
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, start_driver


@pytest.mark.parametrize("key", [KEY, bytes(32)], ids=["released", "refused"])
def test_a_slots_process_says_why_the_slot_ended(key: bytes) -> None:
    """The driver quotes it where workers are missing."""
    driver = start_driver(admit=lambda facts: "localhost has no torch")
    posted: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
    launcher = LocalLauncher(None, HostSlots({"localhost": 1}), SystemClock())
    try:
        launcher.start(SlotSpec(address=driver.server.address, key=key, attempt=ATTEMPT), posted.put)
        launcher.launch(1)
        if key == KEY:
            slot = driver.await_event(RegisterSlot).slot
            driver.server.release_slot(slot, "localhost has no torch")
        ended = posted.get(timeout=30.0)
        assert isinstance(ended, LaunchEnded)
        assert ("localhost has no torch" if key == KEY else "key") in ended.reason
    finally:
        assert launcher.close(10.0) == []
        driver.close()


def test_a_slots_process_ignores_ctrl_c() -> None:
    """A terminal signals all processes; those of a slot would end with a traceback each, before they are told to."""
    driver = start_driver(admit=lambda facts: "so that it starts no worker")
    posted: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
    launcher = LocalLauncher(None, HostSlots({"localhost": 1}), SystemClock())
    try:
        launcher.start(SlotSpec(address=driver.server.address, key=KEY, attempt=ATTEMPT), posted.put)
        launcher.launch(1)
        slot = driver.await_event(RegisterSlot).slot
        launcher.kill(1, signal.SIGINT)
        driver.server.release_slot(slot, "the caller was interrupted")
        ended = posted.get(timeout=30.0)
        assert isinstance(ended, LaunchEnded)
        assert ended.reason == "the caller was interrupted"
    finally:
        assert launcher.close(10.0) == []
        driver.close()
