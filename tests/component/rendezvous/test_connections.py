"""Connections end: a process that dies is noticed by its open request, one that merely dials again is not; `close` ends
waits at once and leaves nothing behind (the test-wide leak check looks at threads and descriptors)."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from spark_elastic.errors import ConnectionClosed
from spark_elastic.protocol import events
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.messages import Heartbeat, RequestNextWorld
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, WatchSlot, WatchWorker
from spark_elastic.rendezvous.server import ConnectionTracker
from spark_elastic.testing.fakes import FakeClock
from tests.component.rendezvous.cut_connections import CuttableNetwork
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, PATIENCE, Driver, world

PROGRAM = """
import sys
from spark_elastic.clock import SystemClock
from spark_elastic.protocol import messages
from spark_elastic.rendezvous import messages as own
from spark_elastic.rendezvous.client import RendezvousClient
client = RendezvousClient(sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), SystemClock())
print("ready", flush=True)
print(eval(sys.argv[4], {"client": client, **vars(messages), **vars(own)}))
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def process(driver: Driver) -> Iterator[Start]:
    """Starts a client process that evaluates a call; returns once it is about to."""
    started: list[subprocess.Popen[str]] = []

    def start(call: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, driver.server.address, KEY.hex(), str(ATTEMPT), call]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("call", "worker"),
    [
        ('client.ask(RequestNextWorld("1-0.1"), 20.0)', "1-0.1"),
        ('client.ask(WatchWorker("1-0.1"), 20.0)', "1-0.1"),
        ('(client.ask(Heartbeat("1-0")), client.ask(WatchSlot("1-0"), 20.0))', None),
    ],
)
def test_a_killed_process_is_noticed_and_comes_back(
    driver: Driver, process: Start, call: str, worker: str | None
) -> None:
    child = process(call)
    driver.until_polls(1)
    child.kill()
    lost = driver.await_event(events.ConnectionLost)
    assert (lost.slot, lost.worker, lost.reset) == ("1-0", worker, False)
    again = Heartbeat("1-0") if worker is None else RequestNextWorld(worker)
    driver.client().ask(again)
    back = driver.await_event(events.ConnectionBack)
    assert (back.slot, back.worker) == ("1-0", worker)


def test_r18_a_reset_by_the_network_differs_from_a_close_by_the_kernel(
    driver: Driver, network: CuttableNetwork
) -> None:
    client = driver.client(address=network.address)
    waiting = driver.call_in_thread(lambda: client.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS))
    driver.until_polls(1)
    network.reset()
    lost = driver.await_event(events.ConnectionLost)
    assert (lost.slot, lost.reset) == ("1-0", True)
    client.close()
    with pytest.raises(ConnectionClosed):
        waiting.result(PATIENCE)


def test_a_slot_that_dials_again_before_its_old_connection_ends_is_not_lost(driver: Driver) -> None:
    first, second = driver.client(), driver.client()
    driver.call_in_thread(lambda: first.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS))
    waiting = driver.call_in_thread(lambda: second.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS))
    driver.until_polls(2)
    first.close()
    driver.until_polls(1)
    driver.server.release_slot("1-0", "enough")
    assert waiting.result(PATIENCE).release == "enough"
    with pytest.raises(queue.Empty):
        driver.events.get_nowait()


def test_a_long_poll_that_ends_in_time_is_no_lost_connection(driver: Driver) -> None:
    client = driver.client()
    client.ask(WatchSlot("1-0"), hold=0.05)
    client.ask(WatchWorker("1-0.1"), hold=0.05)
    client.close()
    assert driver.events.empty()


def test_slots_are_counted() -> None:
    posted: list[DriverEvent] = []
    tracker = ConnectionTracker(posted.append, FakeClock())
    slot, worker, other = ("1-0", None), ("1-0", "1-0.1"), ("2-0", None)
    counts = []
    for change, peer in ((1, slot), (1, worker), (1, slot), (1, other), (-1, slot), (-1, other), (-1, slot)):
        tracker.open_poll(peer) if change > 0 else tracker.close_poll(peer, None)
        counts.append(tracker.slot_count)
    assert counts == [1, 1, 1, 2, 2, 1, 0]
    assert not posted


def test_closing_a_client_frees_all_its_threads(driver: Driver) -> None:
    client = driver.client()
    driver.server.publish(world(1, "2-0.1"))
    asked: list[Any] = [RequestNextWorld("1-0.1"), WatchWorker("1-0.1"), WatchSlot("1-0")]
    asks = [partial(client.ask, request, hold=MAX_POLL_SECONDS) for request in asked]
    waits = [driver.call_in_thread(ask) for ask in asks]
    driver.until_polls(3)
    client.close()
    for wait in waits:
        with pytest.raises(ConnectionClosed):
            wait.result(PATIENCE)
    with pytest.raises(ConnectionClosed):
        asks[0]()
    client.close()


def test_closing_a_client_frees_a_thread_that_waits_to_dial_again(driver: Driver) -> None:
    unreachable = driver.client(address="127.0.0.1:1")
    wait = driver.call_in_thread(lambda: unreachable.ask(Heartbeat("1-0")))
    unreachable.close()
    with pytest.raises(ConnectionClosed):
        wait.result(PATIENCE)


def test_closing_the_server_answers_open_requests(driver: Driver) -> None:
    worker = driver.client()
    join = driver.call_in_thread(lambda: worker.ask(RequestNextWorld("1-0.1"), hold=MAX_POLL_SECONDS))
    driver.await_event(RequestNextWorld)
    driver.server.close()
    assert join.result(PATIENCE).stop == "the driver has closed"


def test_a_closed_clients_connections_are_closed_once_its_threads_left(driver: Driver) -> None:
    client = driver.client()
    for _ in range(3):
        client.ask(Heartbeat("1-0"))
    client.close()
    gc.collect()
    assert not client._sockets
