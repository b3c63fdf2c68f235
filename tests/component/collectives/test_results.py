"""What collectives compute, on real processes: by sockets, in memory that ranks of a host share, and on two hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.component.collectives import calls
from tests.component.collectives.ranks import Pool, Rank, answers, call_all

SHARED = [(2,), (4,), (2, 2), (3, 1), (1, 2)]
FAULTS = [pytest.mark.faults, pytest.mark.timeout(900)]
SPLIT = [(size,) for size in range(1, 9)] + [(size - size // 2, size // 2) for size in range(2, 9)]
MANY = [pytest.param(sum(hosts), hosts, id=f"all of {hosts}", marks=FAULTS) for hosts in SPLIT]


def by_sockets(*sizes: int) -> list[object]:
    return [pytest.param(size, (), id=f"{size} by sockets") for size in sizes]


EVERYWHERE = [*by_sockets(1, 2, 3, 4, 5), *((sum(hosts), hosts) for hosts in SHARED), *MANY]


def make_world(pool: Pool, size: int, hosts: Sequence[int]) -> list[Rank]:
    ranks = pool.take(size)
    pool.world(ranks, timeout=120.0, hosts=hosts)
    return ranks


@pytest.mark.parametrize(("size", "hosts"), EVERYWHERE)
def test_r07_reductions_are_right_and_equal_bit_by_bit(pool: Pool, size: int, hosts: Sequence[int]) -> None:
    answered = call_all(make_world(pool, size, hosts), calls.reduce_everything)
    assert [wrong for wrong, _ in answered] == [[]] * size
    assert len({digest for _, digest in answered}) == 1


@pytest.mark.parametrize(("size", "hosts"), [*by_sockets(2), (2, (2,)), (3, (2, 1)), *MANY])
def test_reductions_of_several_chunks_are_right(pool: Pool, size: int, hosts: Sequence[int]) -> None:
    assert call_all(make_world(pool, size, hosts), calls.reduce_in_chunks, hosts) == [[]] * size


@pytest.mark.parametrize(("size", "hosts"), EVERYWHERE)
def test_every_other_collective_is_right(pool: Pool, size: int, hosts: Sequence[int]) -> None:
    ranks = make_world(pool, size, hosts)
    assert call_all(ranks, calls.exchange_everything) == [[]] * size
    assert call_all(ranks, calls.check_other_collectives) == [[]] * size


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shared", [False, True])
def test_hundreds_of_generations_on_one_endpoint_leak_nothing(pool: Pool, shared: bool) -> None:
    """Nor has shared memory a name."""
    ranks = pool.take(2 if shared else 3)
    first = max(next(pool.generations) for _ in range(400)) - 399
    everybody = [rank.address for rank in ranks]
    for number, rank in enumerate(ranks):
        rank.call(calls.rebuild, everybody, number, first, 400, shared)
    for early, late in answers(ranks):
        assert late["descriptors"] <= early["descriptors"] + 2  # a neighbour's hello may just be coming in
        assert late["threads"] == early["threads"]
        assert late["mappings"] <= early["mappings"] + 4
        assert late["bytes"] < early["bytes"] + (4 << 20)
    assert [name for name in os.listdir("/dev/shm") if "elastic" in name] == []


@pytest.mark.parametrize("hosts", SHARED)
def test_operands_in_shared_memory(pool: Pool, hosts: tuple[int, ...]) -> None:
    ranks = make_world(pool, sum(hosts), hosts)
    assert call_all(ranks, calls.reduce_in_buffers) == [[]] * len(ranks)
    in_memory = [count for count in hosts for _ in range(count)]
    assert call_all(ranks, calls.segments) == [min(count - 1, 1) for count in in_memory]


@pytest.mark.parametrize(("refused", "limit"), [(0, "files"), (2, "mappings")])
def test_all_ranks_of_a_host_use_sockets_if_one_gets_no_memory(pool: Pool, refused: int, limit: str) -> None:
    ranks = pool.take(3)
    pool.world(ranks)
    call_all(ranks, calls.record_warnings)
    assert call_all(ranks[refused : refused + 1], calls.refuse_memory, limit) == [None]
    for _ in range(2):  # and it is said once
        pool.world(ranks, hosts=(3,))
        assert call_all(ranks, calls.reduce_once, 1000) == [6.0] * 3
    assert call_all(ranks, calls.segments) == [0] * 3
    assert call_all(ranks[refused : refused + 1], calls.allow_memory, limit) == [None]
    assert call_all(ranks, calls.reduce_in_buffers) == [[]] * 3  # what they are given then is their own
    pool.world(ranks, hosts=(3,))
    assert call_all(ranks, calls.reduce_once, 1000) == [6.0] * 3
    assert call_all(ranks, calls.segments) == [1] * 3
    heard = call_all(ranks, calls.read_warnings)
    assert [len(said) for said in heard] == [int(rank == refused) for rank in range(3)]
    assert heard[refused][0].startswith(
        f"ranks 0, 1, 2 of one host exchange through sockets, since rank {refused} has no shared memory: "
    )


def test_r11_shared_memory_outlives_its_group_and_is_used_by_no_other(pool: Pool) -> None:
    ranks = pool.take(2)
    pool.world(ranks, hosts=(2,))
    call_all(ranks, calls.keep_buffer)
    pool.world(ranks, hosts=(2,))
    assert call_all(ranks, calls.reduce_once, 100_000) == [3.0, 3.0]
    # This generation's, and the kept memory of the one before.
    assert call_all(ranks, calls.segments) == [2, 2]
    assert call_all(ranks, calls.is_kept_buffer_unchanged) == [True, True]
    assert call_all(ranks, calls.segments) == [1, 1]
