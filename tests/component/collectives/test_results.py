"""What collectives compute, on real processes: by sockets in worlds of one to eight, on one host and on two."""

from __future__ import annotations

import os

import pytest

from tests.component.collectives import calls
from tests.component.collectives.ranks import Pool, answers, call_all

HOSTS = [(2,), (4,), (2, 2), (3, 1), (1, 2)]
SOCKETS = [pytest.param(size, (), id=f"{size} by sockets") for size in range(1, 9)]
SHARED = [pytest.param(sum(hosts), hosts, id=f"hosts of {hosts}") for hosts in HOSTS]


@pytest.mark.parametrize(("size", "hosts"), [*SOCKETS, *SHARED])
def test_r07_reductions_are_right_and_equal_bit_by_bit(pool: Pool, size: int, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(size)
    pool.world(ranks, hosts=hosts)
    found = call_all(ranks, calls.reduce_everything)
    assert [wrong for wrong, _ in found] == [[]] * size
    assert len({digest for _, digest in found}) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_reductions_of_several_chunks_are_right(pool: Pool, size: int) -> None:
    ranks = pool.take(size)
    pool.world(ranks)
    assert call_all(ranks, calls.reduce_in_chunks) == [[]] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_allgather_gives_each_rank_the_part_of_every_rank(pool: Pool, size: int) -> None:
    ranks = pool.take(size)
    pool.world(ranks)
    assert call_all(ranks, calls.exchange_everything) == [[]] * size


@pytest.mark.parametrize(("size", "hosts"), [*SOCKETS, *SHARED])
def test_every_other_collective_is_right(pool: Pool, size: int, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(size)
    pool.world(ranks, hosts=hosts)
    assert call_all(ranks, calls.check_other_collectives) == [[]] * size


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shared", [False, True])
def test_a_thousand_generations_on_one_endpoint_leak_nothing(pool: Pool, shared: bool) -> None:
    """Nor has shared memory a name."""
    ranks = pool.take(2 if shared else 3)
    first = max(next(pool.generations) for _ in range(1000)) - 999
    everybody = [rank.address for rank in ranks]
    for number, rank in enumerate(ranks):
        rank.call(calls.rebuild, everybody, number, first, 1000, shared)
    for early, late in answers(ranks):
        assert late["descriptors"] <= early["descriptors"] + 2  # a neighbour's hello may just be coming in
        assert late["threads"] == early["threads"]
        assert late["mappings"] <= early["mappings"] + 4
        assert late["bytes"] < early["bytes"] + (4 << 20)
    assert [name for name in os.listdir("/dev/shm") if "elastic" in name] == []
