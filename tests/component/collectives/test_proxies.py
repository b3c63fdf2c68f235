"""What the network between two ranks may do: be slow, so that a state takes longer than the timeout, break a connection
that nobody needed yet, listen, and change what it carries, in the clear and inside TLS."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from elastic_collectives import CollectiveError, Endpoint, Group, connect, engine

pytestmark = pytest.mark.native

RATE = 10_000_000  # bytes per second
STATE = 30_000_000  # bytes
PATTERN = b"a gradient that nobody else should see; "
KEY = b"key"
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


FAULTS = pytest.mark.faults


@pytest.mark.parametrize(
    ("work", "size", "local", "least"),
    [
        pytest.param(allgather, 2, None, TIMEOUT + 2.0),
        pytest.param(adasum, 2, None, TIMEOUT + 2.0, marks=FAULTS),
        pytest.param(broadcast, 2, None, TIMEOUT + 2.0, marks=FAULTS),
        pytest.param(alltoall, 2, None, TIMEOUT + 2.0, marks=FAULTS),
        # Ranks behind the slow part of a ring wait, and those of a host for its first one that exchanges.
        pytest.param(allgather_one_part, 3, None, TIMEOUT + 2.0),
        pytest.param(reduce, 3, [[0, 1], [0, 1], [2]], 2 * TIMEOUT + 3.0),
    ],
)
def test_a_large_operation_over_a_slow_network_does_not_time_out(
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Group], bool],
    size: int,
    local: list[list[int]] | None,
    least: float,
) -> None:
    monkeypatch.setattr(engine, "BROADCAST_PART", 1_000_000)
    assert run(size, work, local) > least  # or it shows nothing


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
        road = stack.enter_context(open_proxy(ends[-1].address, delay, broken))
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
def open_proxy(to: str, carry: Callable[[bytes], bytes], broken: int = 0) -> Iterator[str]:
    """An address that leads to another one. carry: returns what arrives of a piece of data. broken: so many connections
    are closed before one is forwarded."""
    host, port = to.rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(20.0)
        with ThreadPoolExecutor(3) as pool:
            pool.submit(_forward, door, (host, int(port)), pool, carry, broken)
            yield f"127.0.0.1:{door.getsockname()[1]}"


def _forward(
    door: socket.socket,
    to: tuple[str, int],
    pool: ThreadPoolExecutor,
    carry: Callable[[bytes], bytes],
    broken: int,
) -> None:
    for _ in range(broken):
        door.accept()[0].close()
    dialler, _ = door.accept()
    with dialler, socket.create_connection(to) as acceptor:
        back = pool.submit(_carry, acceptor, dialler, carry)
        _carry(dialler, acceptor, carry)
        back.result()


def _carry(source: socket.socket, to: socket.socket, carry: Callable[[bytes], bytes]) -> None:
    try:
        while some := source.recv(1 << 16):
            to.sendall(carry(some))
        to.shutdown(socket.SHUT_WR)
    except OSError:
        """One side has gone."""


def delay(data: bytes) -> bytes:
    time.sleep(len(data) / RATE)
    return data


class Eavesdropper:
    """Remembers what goes by, and changes it once told to."""

    def __init__(self) -> None:
        self.heard, self.changes = bytearray(), threading.Event()

    def __call__(self, data: bytes) -> bytes:
        self.heard += data
        return bytes([*data[:-1], data[-1] ^ 1]) if self.changes.is_set() else data


@contextmanager
def _ranks(encrypted: bool) -> Iterator[tuple[Eavesdropper, Group, Group]]:
    between = Eavesdropper()
    with Endpoint(KEY, encrypted=encrypted) as first, Endpoint(KEY, encrypted=encrypted) as second:
        with open_proxy(second.address, between) as road:
            blobs = [first.address.encode(), road.encode()]
            with connect(first, 0, 2, (1, 1), lambda own: blobs, 20.0) as low:
                with connect(second, 1, 2, (1, 1), lambda own: blobs, 20.0) as high:
                    yield between, low, high


def _share(group: Group) -> bytes:
    data = np.frombuffer(bytearray(PATTERN * 1000 if group.rank == 0 else len(PATTERN) * 1000), np.uint8)
    group.broadcast(data, 0)
    return data.tobytes()


@pytest.mark.parametrize("encrypted", [False, True])
def test_p6_an_eavesdropper_reads_no_data(encrypted: bool) -> None:
    with _ranks(encrypted) as (between, low, high), ThreadPoolExecutor(2) as threads:
        assert list(threads.map(_share, (low, high))) == [PATTERN * 1000] * 2
        assert (PATTERN in between.heard) is not encrypted


def test_p6_data_that_is_changed_in_transit_breaks_the_group() -> None:
    with _ranks(encrypted=True) as (between, low, high), ThreadPoolExecutor(2) as threads:
        list(threads.map(_share, (low, high)))
        between.changes.set()
        ends = [threads.submit(_share, group) for group in (low, high)]
        errors = [end.exception() for end in ends]
        assert isinstance(errors[1], CollectiveError)
        assert "changed on the way" in str(errors[1])
