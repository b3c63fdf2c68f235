"""Slot jobs of this machine, whose processes may not come about."""

from __future__ import annotations

import queue
import subprocess

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher
from spark_elastic.protocol.events import DriverEvent, LaunchEnded
from spark_elastic.protocol.slot_spec import SlotSpec


def test_a_process_that_cannot_be_started_ends_its_slot_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else could tell: the driver would wait for that slot for ever."""

    def fail(*given: object, **named: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    posted: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
    hosts = HostSlots({"localhost": 1})
    launcher = LocalLauncher(None, hosts, SystemClock())
    launcher.start(SlotSpec(address="127.0.0.1:1", key=b"k" * 32, attempt=1), posted.put)
    for job in (1, 2):
        launcher.launch(job)
        ended = posted.get(timeout=10.0)
        assert isinstance(ended, LaunchEnded)
        assert ended.launch == job
        assert "could not be started ([Errno 11] Resource temporarily unavailable)" in ended.reason
    assert launcher.close(1.0) == []
