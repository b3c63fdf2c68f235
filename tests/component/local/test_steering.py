"""Workers drained by hand and hosts listed by a function, on real processes; how a slot's process ends."""

from __future__ import annotations

import json
import queue
import signal
from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import HostPoller, JobHandle
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.errors import JobCancelled
from spark_elastic.protocol.events import DriverEvent, LaunchEnded
from spark_elastic.protocol.messages import RegisterSlot
from spark_elastic.protocol.types import Limits, SlotSpec
from spark_elastic.testing.fakes import CountingProgram
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, start_driver
from tests.component.worker.moments import ActListener, HeldProgram
from tests.journals import keep_journal
from tests.patience import until

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

CLOCK = SystemClock()


def _run(
    program: CountingProgram, launcher: LocalLauncher, listener: ActListener, **settings: Any
) -> LaunchResult:
    discovery = HostPoller(lambda: {"a": 1, "b": 1}, CLOCK)
    limits, config = Limits(2, 1, 2, gather_timeout=60.0), ElasticConfig(**settings)
    result = supervise(launcher, discovery, DriverOptions(), limits, config, "test", listener)
    sums = {json.loads(text)["sum"] for text in result.results if text != "null"}
    assert sums == {program.expected_sum()}
    return result


def test_w26_a_drained_worker_costs_no_step_and_its_core_is_free() -> None:
    program, handle = HeldProgram(30, 0.03), JobHandle()
    launcher = LocalLauncher(program, HostSlots({"a": 1, "b": 1}), CLOCK)
    left: list[int] = []

    def drain() -> None:
        handle.drain(rank=1, reason="its core is wanted elsewhere")
        until(lambda: len(launcher.slots()) == 1)
        left.append(len(launcher.slots()))
        program.release()

    with keep_journal(ElasticConfig()) as (config, journal):
        result = _run(program, launcher, ActListener(10, drain), handle=handle, journal=config.journal)
    assert [world.size for world in result.worlds] == [2, 1]
    assert left == [1]
    assert "broke" not in " ".join(journal)
    assert any("its core is wanted elsewhere" in line for line in journal)


def test_hosts_that_a_discovery_function_no_longer_lists_are_drained() -> None:
    program = HeldProgram(30, 0.03)
    launcher = LocalLauncher(program, HostSlots({"a": 1, "b": 1}), CLOCK)
    listed = {"a": 1, "b": 1}
    listener = ActListener(10, lambda: listed.pop("a"), then=program.release)
    result = _run(program, launcher, listener, host_discovery=lambda: dict(listed))
    assert [world.size for world in result.worlds] == [2, 1]


def test_a_job_is_ended_by_its_handle() -> None:
    program, handle = CountingProgram(2000, 0.03), JobHandle()
    launcher = LocalLauncher(program, HostSlots({"a": 1, "b": 1}), CLOCK)
    with pytest.raises(JobCancelled, match="enough is enough"):
        _run(program, launcher, ActListener(3, lambda: handle.cancel("enough is enough")), handle=handle)


# ---- a slot's process


@pytest.mark.parametrize("key", [KEY, bytes(32)], ids=["released", "refused"])
def test_a_slots_process_ignores_ctrl_c_and_says_why_the_slot_ended(key: bytes) -> None:
    """A terminal signals all processes; those of a slot would end with a traceback each, before they are told to. The
    driver quotes the reason where workers are missing."""
    driver = start_driver(admit=lambda facts: "localhost has no torch")
    posted: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
    launcher = LocalLauncher(None, HostSlots({"localhost": 1}), SystemClock())
    try:
        launcher.start(SlotSpec(address=driver.server.address, key=key, attempt=ATTEMPT), posted.put)
        launcher.launch(1)
        if key == KEY:
            slot = driver.await_event(RegisterSlot).slot
            launcher.kill(1, signal.SIGINT)
            driver.server.release_slot(slot, "localhost has no torch")
        ended = posted.get(timeout=30.0)
        assert isinstance(ended, LaunchEnded)
        assert ("localhost has no torch" if key == KEY else "key") in ended.reason
    finally:
        assert launcher.close(10.0) == []
        driver.close()
