"""A state that takes longer than the timeout comes through nevertheless: no wait is for more than a part of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from elastic_collectives import Endpoint, connect, engine

pytestmark = pytest.mark.native

RATE = 10_000_000  # bytes per second
STATE = 40_000_001  # bytes
TIMEOUT = 0.5  # seconds, and two more while the peer is alive


def test_a_large_broadcast_over_a_slow_network_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BROADCAST_PART", 1_000_000)
    sent = np.random.default_rng(1).integers(0, 256, STATE, np.uint8)
    came = np.zeros_like(sent)
    with Endpoint(b"key") as first, Endpoint(b"key") as second, open_slow_proxy(second.address) as road:
        addresses = [first.address.encode(), road.encode()]

        def take_part(rank: int) -> None:
            end = (first, second)[rank]
            with connect(end, rank, 2, (1, 1), lambda own: addresses, TIMEOUT) as group:
                group.broadcast((sent, came)[rank], 0)
                all_through.wait(60)

        all_through = threading.Barrier(2)
        begin = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(take_part, range(2)))
    assert time.monotonic() - begin > TIMEOUT + 2.0  # or it shows nothing
    assert np.array_equal(came, sent)


@contextmanager
def open_slow_proxy(to: str) -> Iterator[str]:
    """An address that leads to another one, at RATE."""
    host, port = to.rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        with ThreadPoolExecutor(3) as pool:
            pool.submit(_forward, door, (host, int(port)), pool)
            yield f"127.0.0.1:{door.getsockname()[1]}"


def _forward(door: socket.socket, to: tuple[str, int], pool: ThreadPoolExecutor) -> None:
    dialler, _ = door.accept()
    with dialler, socket.create_connection(to) as acceptor:
        back = pool.submit(_carry, acceptor, dialler)
        _carry(dialler, acceptor)
        back.result()


def _carry(source: socket.socket, to: socket.socket) -> None:
    try:
        while some := source.recv(1 << 16):
            time.sleep(len(some) / RATE)
            to.sendall(some)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        """One side has gone."""
