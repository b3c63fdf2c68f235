"""Places of slots on hosts, and slot jobs of this machine, whose processes may not come about."""

from __future__ import annotations

import queue
import socket
import subprocess
import threading
from queue import Empty, SimpleQueue

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher, find_remote_hosts
from spark_elastic.protocol.events import DriverEvent, LaunchEnded
from spark_elastic.protocol.types import SlotSpec


def test_a_host_whose_slots_end_does_not_get_all_others() -> None:
    hosts = HostSlots({"a": 2, "b": 1})
    assert [hosts.acquire(job) for job in (1, 2, 3)] == ["a", "a", "b"]
    hosts = HostSlots({"a": 2, "b": 2, "c": 1})
    tried = []
    for job in range(4):
        host = hosts.acquire(job)
        assert host is not None
        tried.append(host)
        hosts.release(host)
    assert tried == ["a", "b", "c", "a"]


def test_a_waiting_slot_gets_a_place_that_is_released_or_added() -> None:
    hosts = HostSlots({"a": 1})
    got: SimpleQueue[str | None] = SimpleQueue()
    assert hosts.acquire(1) == "a"
    threads = [threading.Thread(target=lambda job=job: got.put(hosts.acquire(job))) for job in (2, 3, 4)]
    for thread in threads:
        thread.start()
    with pytest.raises(Empty):
        got.get(timeout=0.1)
    hosts.release("a")
    assert got.get(timeout=10) == "a"
    hosts.update({"b": 1})
    assert got.get(timeout=10) == "b"
    hosts.close()
    assert got.get(timeout=10) is None
    for thread in threads:
        thread.join(10)


def test_only_names_of_this_machine_count_as_this_machine() -> None:
    here = {"localhost": 1, "127.0.0.2": 1, socket.gethostname(): 1}
    assert find_remote_hosts(here) == []
    assert find_remote_hosts({**here, "192.0.2.7": 1}) == ["192.0.2.7"]


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
