"""A state that takes longer than the timeout comes through nevertheless: no wait is for more than a part of it. And a
connection that nobody needed yet may break."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from elastic_collectives import Endpoint, Group, connect, engine

pytestmark = pytest.mark.native

RATE = 10_000_000  # bytes per second
STATE = 30_000_000  # bytes
TIMEOUT = 0.5  # seconds, and two more while the peer is alive


def broadcast(group: Group) -> bool:
    sent = np.random.default_rng(1).integers(0, 256, STATE, np.uint8)
    array = sent.copy() if group.rank == 0 else np.zeros_like(sent)
    group.broadcast(array, 0)
    return np.array_equal(array, sent)


def allgather(group: Group) -> bool:
    gathered = group.allgather(np.full(STATE, group.rank + 1, np.uint8))
    return all((part == rank + 1).all() for rank, part in enumerate(gathered))


def allgather_one_part(group: Group) -> bool:
    """Rank 0 gets the last rank's part over the slow road, and rank 1 gets it from rank 0."""
    mine = np.full(STATE if group.rank == group.size - 1 else 0, 7, np.uint8)
    parts = group.allgatherv(mine)
    return [len(part) for part in parts] == [0, 0, STATE] and bool((parts[-1] == 7).all())


def alltoall(group: Group) -> bool:
    parts = [np.full(STATE, 2 * group.rank + to, np.uint8) for to in range(group.size)]
    came = [np.zeros(STATE, np.uint8) for _ in parts]
    group.alltoall_arrays(parts, came)
    return all((part == 2 * source + group.rank).all() for source, part in enumerate(came))


def adasum(group: Group) -> bool:
    array = np.full(2 * STATE // 8, 3.0)  # half of it goes to the other rank
    group.allreduce(array, "adasum")
    return np.allclose(array, 3.0)


def reduce(group: Group) -> bool:
    array = np.full(2 * STATE, group.rank + 1, np.uint8)
    group.allreduce(array)
    return bool((array == 6).all())


@pytest.mark.parametrize(
    "work",
    [allgather, adasum, *(pytest.param(work, marks=pytest.mark.faults) for work in (broadcast, alltoall))],
)
def test_a_large_operation_over_a_slow_network_does_not_time_out(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Group], bool]
) -> None:
    monkeypatch.setattr(engine, "BROADCAST_PART", 1_000_000)
    seconds = run(2, work, None)
    assert seconds > TIMEOUT + 2.0  # or it shows nothing


def test_ranks_behind_the_slow_part_of_a_ring_do_not_time_out() -> None:
    seconds = run(3, allgather_one_part, None)
    assert seconds > TIMEOUT + 2.0  # or it shows nothing


def test_a_host_whose_first_rank_exchanges_over_a_slow_network_waits_for_it_as_long_as_bytes_flow() -> None:
    seconds = run(3, reduce, [[0, 1], [0, 1], [2]])
    assert seconds > 2 * TIMEOUT + 3.0  # or it shows nothing


def test_a_connection_that_was_opened_only_for_keepalives_may_break() -> None:
    def wait_then_gather(group: Group) -> bool:
        """Rank 1 lets rank 0 wait, which dials rank 2 meanwhile, but needs it only to gather."""
        group.set_timeout(3.0)
        if group.rank == 1:
            time.sleep(2.5)
        group.broadcast(np.zeros(10), 1)
        group.set_timeout(20.0)
        return bool((group.allgather(np.array([group.rank])) == [[0], [1], [2]]).all())

    run(3, wait_then_gather, None, broken=1)


def run(size: int, work: Callable[[Group], bool], local: list[list[int]] | None, broken: int = 0) -> float:
    """`work` on every rank, where rank 0 reaches the last one at RATE; the seconds it took."""
    with ExitStack() as stack:
        ends = [stack.enter_context(Endpoint(b"key")) for _ in range(size)]
        road = stack.enter_context(open_slow_proxy(ends[-1].address, broken))
        addresses = [end.address.encode() for end in ends]
        all_through = threading.Barrier(size)

        def take_part(rank: int) -> bool:
            peers = [*addresses[:-1], road.encode()] if rank == 0 else addresses
            mine = local and local[rank]
            with connect(ends[rank], rank, size, (1, 1), lambda own: peers, TIMEOUT, mine) as group:
                right = work(group)
                all_through.wait(60)
                return right

        begin = time.monotonic()
        with ThreadPoolExecutor(size) as pool:
            assert all(pool.map(take_part, range(size)))
        return time.monotonic() - begin


@contextmanager
def open_slow_proxy(to: str, broken: int) -> Iterator[str]:
    """An address that leads to another one, at RATE; so many connections are closed before one is forwarded."""
    host, port = to.rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(20.0)
        with ThreadPoolExecutor(3) as pool:
            pool.submit(_forward, door, (host, int(port)), pool, broken)
            yield f"127.0.0.1:{door.getsockname()[1]}"


def _forward(door: socket.socket, to: tuple[str, int], pool: ThreadPoolExecutor, broken: int) -> None:
    for _ in range(broken):
        door.accept()[0].close()
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
