"""A process that dies is noticed by its open request, one that merely dials again is not."""

from __future__ import annotations

import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from spark_elastic.errors import ConnectionClosed
from spark_elastic.protocol import events
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.messages import Heartbeat, RequestNextWorld
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, WatchSlot, WatchWorker
from spark_elastic.rendezvous.routes import ConnectionTracker
from spark_elastic.testing.fakes import FakeClock
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, PATIENCE, Driver

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


class Relay:
    """A box on the way to the driver, which may lose what it knows of its connections."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = port
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._carry, args=ends))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                to.sendall(data)

    def reset(self) -> None:
        """Both ends of every connection hear that it is unknown here; there are no new ones."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in self._ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RD)  # wakes its thread
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()


@pytest.fixture
def process(driver: Driver) -> Iterator[Start]:
    """Starts a client process that evaluates a call; returns once it is about to."""
    started: list[subprocess.Popen[str]] = []

    def start(call: str) -> subprocess.Popen[str]:
        arguments = [driver.server.address, KEY.hex(), str(ATTEMPT), call]
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
        )
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
    again = Heartbeat("1-0") if worker is None else RequestNextWorld(worker, None, None)
    driver.client().ask(again)
    back = driver.await_event(events.ConnectionBack)
    assert (back.slot, back.worker) == ("1-0", worker)


def test_r18_a_reset_by_the_network_differs_from_a_close_by_the_kernel(driver: Driver) -> None:
    with Relay(driver.port) as relay:
        client = driver.client(address=relay.address)
        waiting = driver.call_in_thread(lambda: client.ask(WatchSlot("1-0", 0), hold=MAX_POLL_SECONDS))
        driver.until_polls(1)
        relay.reset()
        lost = driver.await_event(events.ConnectionLost)
        assert (lost.slot, lost.reset) == ("1-0", True)
        client.close()
        with pytest.raises(ConnectionClosed):
            waiting.result(PATIENCE)


def test_a_slot_that_dials_again_before_its_old_connection_ends_is_not_lost(driver: Driver) -> None:
    first, second = driver.client(), driver.client()
    driver.call_in_thread(lambda: first.ask(WatchSlot("1-0", 0), hold=MAX_POLL_SECONDS))
    waiting = driver.call_in_thread(lambda: second.ask(WatchSlot("1-0", 0), hold=MAX_POLL_SECONDS))
    driver.until_polls(2)
    first.close()
    driver.until_polls(1)
    driver.server.release_slot("1-0", "enough")
    assert waiting.result(PATIENCE).release == "enough"
    with pytest.raises(queue.Empty):
        driver.events.get_nowait()


def test_a_long_poll_that_ends_in_time_is_no_lost_connection(driver: Driver) -> None:
    client = driver.client()
    client.ask(WatchSlot("1-0", 0), hold=0.05)
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
