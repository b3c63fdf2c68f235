"""Which connections an endpoint accepts: fences, unauthenticated connections during a world, addresses and ports."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest

from elastic_collectives import CollectiveError, Endpoint, Group, PeerLost, connect
from tests.component.collectives import calls
from tests.component.collectives.ranks import Pool, answers, call_all


def _pair(first: Endpoint, second: Endpoint, *fences: tuple[int, int]) -> tuple[Group, Group]:
    blobs = [first.address.encode(), second.address.encode()]
    low, high = (
        connect(end, rank, 2, fence, lambda own: blobs, 10.0)
        for rank, (end, fence) in enumerate(zip((first, second), fences, strict=True))
    )
    return low, high


def _sum(group: Group) -> float:
    array = np.full(1000, group.rank + 1.0)
    group.allreduce(array)
    return float(array[0])


@contextmanager
def _open_two_endpoints() -> Iterator[tuple[Endpoint, Endpoint]]:
    with Endpoint(b"key") as first, Endpoint(b"key") as second:
        yield first, second


def test_r10_a_connection_with_an_older_fence_is_refused() -> None:
    with _open_two_endpoints() as (first, second):
        late, current = _pair(first, second, (1, 4), (1, 5))
        with late, current, ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(current.barrier)
            with pytest.raises(PeerLost, match="rank 1") as lost:
                late.barrier()
            assert lost.value.ranks == (1,)
            assert not waiting.done()
            current.abort("the test is over")
            with pytest.raises(CollectiveError, match="the test is over"):
                waiting.result()


def test_r10_a_connection_with_a_newer_fence_waits_for_its_group() -> None:
    with _open_two_endpoints() as (first, second), ThreadPoolExecutor(2) as threads:
        early, current = _pair(first, second, (2, 1), (1, 5))
        with early, current:
            behind = threads.submit(current.barrier)  # accepts the dialer of the newer world meanwhile
            ahead = threads.submit(_sum, early)
            with pytest.raises(TimeoutError):
                ahead.result(timeout=0.3)
            current.abort("a new world is formed")
            assert isinstance(behind.exception(), CollectiveError)
            current.close()
            _, follower = _pair(first, second, (2, 1), (2, 1))
            with follower:
                assert (_sum(follower), ahead.result()) == (3.0, 3.0)


def test_a_process_without_free_descriptors_waits_without_using_the_cpu(pool: Pool) -> None:
    ranks = pool.take(2)
    pool.world(ranks)
    ranks[1].call(calls.exhaust_descriptors, 1.0)  # the higher rank accepts
    ranks[0].call(calls.barrier)
    busy, nothing = ranks[1].answer(), ranks[0].answer()
    assert nothing is None
    assert busy < 0.25, "it span on the connection that it could not accept"


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_peer_with_another_key_is_refused(encrypted: bool) -> None:
    with Endpoint(b"key", encrypted=encrypted) as first, Endpoint(b"another", encrypted=encrypted) as second:
        low, high = _pair(first, second, (1, 1), (1, 1))
        with low, high, ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(high.barrier)
            with pytest.raises(PeerLost, match="does not hold the job's key"):
                low.barrier()
            high.abort("the test is over")
            assert isinstance(waiting.exception(), CollectiveError)


@pytest.mark.parametrize(
    ("how", "address"),
    [({"host": "::1"}, "[::1]:"), ({"host": "0.0.0.0", "advertise": "127.0.0.1"}, "127.0.0.1:")],
)
def test_peers_connect_to_the_address_that_an_endpoint_names(how: dict[str, str], address: str) -> None:
    with Endpoint(b"key") as first, Endpoint(b"key", **how) as second:  # type: ignore[arg-type]
        assert second.address.startswith(address)
        low, high = _pair(first, second, (1, 1), (1, 1))
        with low, high, ThreadPoolExecutor(2) as threads:
            assert list(threads.map(_sum, (low, high))) == [3.0, 3.0]


def test_ports_come_from_the_range_and_an_exhausted_range_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"cannot listen on 127.0.0.1, port {port}: .* port_range"):
            Endpoint(b"key", port_range=(port, port))
    with Endpoint(b"key", port_range=(port, port)) as only:
        assert only.address == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"key": b""}, "key"),
        ({"host": "0.0.0.0"}, "advertise"),
        ({"port_range": (9, 8)}, "port_range"),
        ({"port_range": (0, 8)}, "port_range"),
        ({"host": "no.such.host.invalid"}, "cannot resolve no.such.host.invalid"),
    ],
)
def test_an_endpoint_with_invalid_arguments_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Endpoint(**{"key": b"key", **arguments})  # type: ignore[arg-type]


def test_a_group_with_invalid_arguments_is_refused() -> None:
    end = Endpoint(b"key")
    blobs = [end.address.encode()]
    with pytest.raises(ValueError, match="rank"):
        connect(end, 1, 1, (1, 1), lambda own: blobs)
    with pytest.raises(ValueError, match="2 ranks"):
        connect(end, 0, 2, (1, 1), lambda own: blobs)
    with pytest.raises(ValueError, match="timeout"):
        connect(end, 0, 1, (1, 1), lambda own: blobs, timeout=0)
    with pytest.raises(ValueError, match="port"):
        connect(end, 0, 2, (1, 1), lambda own: [*blobs, b"127.0.0.1:99999"])
    end.close()
    with pytest.raises(RuntimeError, match="closed"):
        connect(end, 0, 1, (1, 1), lambda own: blobs)


def test_a_group_of_one_rank_works_without_peers_and_can_be_aborted(pool: Pool) -> None:
    (rank,) = pool.take(1)
    pool.world([rank])
    assert call_all([rank], calls.reduce_once, 10) == [1.0]
    rank.abort("enough")
    rank.call(calls.try_everything)
    assert answers([rank]) == [{"GroupAborted"}]


def _connect_without_addresses(
    endpoints: Sequence[Endpoint], find: Callable[[int, Sequence[int]], Sequence[str]]
) -> list[Group]:
    size = len(endpoints)
    return [
        connect(end, rank, size, (1, 1), lambda own: [b""] * size, 10.0, find_addresses=partial(find, rank))
        for rank, end in enumerate(endpoints)
    ]


def test_a_collective_asks_for_the_addresses_that_it_needs() -> None:
    asked: list[tuple[int, Sequence[int]]] = []

    def find(rank: int, ranks: Sequence[int]) -> Sequence[str]:
        asked.append((rank, ranks))
        return [endpoints[peer].address for peer in ranks]

    def add_twice(group: Group) -> tuple[float, float]:
        sums = _sum(group), _sum(group)
        some = group.subgroup(1, [1, 4]) if group.rank in (1, 4) else None
        return sums[0], sums[1] if some is None else _sum(some)

    with ExitStack() as stack:
        endpoints = [stack.enter_context(Endpoint(b"key")) for _ in range(5)]
        groups = [stack.enter_context(group) for group in _connect_without_addresses(endpoints, find)]
        with ThreadPoolExecutor(5) as threads:
            assert list(threads.map(add_twice, groups)) == [(15, 3 if r in (1, 4) else 15) for r in range(5)]
    pairs = [(rank, peer) for rank, ranks in asked for peer in ranks]
    assert (1, 4) in pairs
    assert all(rank != peer for rank, peer in pairs)
    of_all = {(rank, peer) for rank in range(5) for peer in range(rank)}  # a lower rank dials
    assert not of_all <= set(pairs)


def test_addresses_that_cannot_be_known_end_the_group() -> None:
    for answer in ([], ["nowhere"]):
        with _open_two_endpoints() as endpoints:
            low, high = _connect_without_addresses(endpoints, lambda rank, ranks: answer)  # noqa: B023
            with low, high, pytest.raises(CollectiveError, match=r"cannot be known|nowhere"):
                low.barrier()


def test_an_error_of_asking_for_addresses_is_raised() -> None:
    def find(rank: int, ranks: Sequence[int]) -> Sequence[str]:
        raise LookupError("nobody knows")

    with _open_two_endpoints() as endpoints:
        low, high = _connect_without_addresses(endpoints, find)
        with low, high:
            with pytest.raises(LookupError, match="nobody knows"):
                low.barrier()
            with pytest.raises(CollectiveError):
                low.barrier()
