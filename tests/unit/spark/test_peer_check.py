"""Probes that dial each other through addresses in a store."""

from __future__ import annotations

import socket
import threading
from typing import Any

import cloudpickle
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.spark import probe as meeting
from spark_elastic.clusters.spark.probe import PeerCheck, Probe
from spark_elastic.data.store import Store
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


def run_check(store: Store, number: int) -> list[str | None]:
    found: list[str | None] = []

    def probe() -> None:
        found.append(PeerCheck(store, "meeting", "127.0.0.1").run(number, SystemClock()))

    threads = [threading.Thread(target=probe) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_peers_that_reach_one_another_find_no_fault() -> None:
    store = make_memory_store()
    assert run_check(store, 3) == [None] * 3
    assert all(name.endswith(".done") for name in store.list("meeting"))


def test_a_peer_that_cannot_be_dialled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    said = run_check(make_memory_store(), 2)
    assert any(address is not None and address.startswith("127.0.0.1:") for address in said)


def test_a_store_that_fails_is_a_fault_and_no_error_of_the_task() -> None:
    store = make_memory_store()
    store.write_bytes("probes/t/driver", b"t")

    def refuse_peers(pipe: Any) -> Any:
        def write(path: str, *arguments: Any, **options: Any) -> None:
            if "/peers/" in path:
                raise OSError("Input/output error")
            pipe(path, *arguments, **options)

        return write

    store.filesystem.pipe_file = refuse_peers(store.filesystem.pipe_file)
    fault = Probe(store, "t", peers=2, reachable_host="127.0.0.1").report(0, cloudpickle.dumps(1)).fault
    assert fault is not None
    assert "could not exchange addresses with other executors, so start the job again: Cannot write" in fault


def test_an_address_that_cannot_be_deleted_stays() -> None:
    store = make_memory_store()

    def refuse(path: str) -> None:
        raise PermissionError("AccessDenied")

    store.filesystem.rm_file = refuse
    assert run_check(store, 2) == [None, None]


def test_a_probe_that_runs_alone_finds_no_fault() -> None:
    """Its time is over, and one that has gone by then is no fault."""
    clock = FakeClock()
    alone = PeerCheck(make_memory_store(), "meeting", "127.0.0.1")
    assert alone.run(2, clock) is None
    assert clock.now() >= meeting.PEERS_SECONDS
