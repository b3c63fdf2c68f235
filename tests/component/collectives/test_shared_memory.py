"""Memory that ranks of one host share, on one host and on two: operands in it, hosts without it, and what stays."""

from __future__ import annotations

import pytest

from tests.component.collectives import calls
from tests.component.collectives import shared_calls as shared
from tests.component.collectives.ranks import Pool, call_all

LAYOUTS = [(2,), (4,), (2, 2), (3, 1), (1, 2)]


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_operands_in_shared_memory_and_parts_for_each_rank(pool: Pool, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(sum(hosts))
    pool.world(ranks, hosts=hosts)
    assert call_all(ranks, shared.reduce_in_buffers) == [[]] * len(ranks)
    assert call_all(ranks, shared.scatter_and_exchange) == [[]] * len(ranks)
    in_memory = [count for count in hosts for _ in range(count)]
    assert call_all(ranks, shared.segments) == [min(count - 1, 1) for count in in_memory]


@pytest.mark.parametrize(("refused", "limit"), [(0, "files"), (2, "mappings")])
def test_all_ranks_of_a_host_use_sockets_if_one_gets_no_shared_memory(
    pool: Pool, refused: int, limit: str
) -> None:
    ranks = pool.take(3)
    pool.world(ranks)
    call_all(ranks, shared.record_warnings)
    assert call_all(ranks[refused : refused + 1], shared.refuse_memory, limit) == [None]
    for _ in range(2):  # and it is said once
        pool.world(ranks, hosts=(3,))
        assert call_all(ranks, calls.reduce_once, 1000) == [6.0] * 3
    assert call_all(ranks, shared.segments) == [0] * 3
    assert call_all(ranks[refused : refused + 1], shared.allow_memory, limit) == [None]
    assert call_all(ranks, shared.reduce_in_buffers) == [[]] * 3  # what they are given then is their own
    pool.world(ranks, hosts=(3,))
    assert call_all(ranks, calls.reduce_once, 1000) == [6.0] * 3
    assert call_all(ranks, shared.segments) == [1] * 3
    heard = call_all(ranks, shared.read_warnings)
    assert [len(said) for said in heard] == [int(rank == refused) for rank in range(3)]
    assert heard[refused][0].startswith(
        f"ranks 0, 1, 2 of one host exchange through sockets, since rank {refused} has no shared memory: "
    )


def test_r11_shared_memory_outlives_its_group_and_is_used_by_no_other(pool: Pool) -> None:
    ranks = pool.take(2)
    pool.world(ranks, hosts=(2,))
    call_all(ranks, shared.keep_buffer)
    pool.world(ranks, hosts=(2,))
    assert call_all(ranks, calls.reduce_once, 100_000) == [3.0, 3.0]
    assert call_all(ranks, shared.segments) == [
        2,
        2,
    ]  # this generation's, and the kept memory of the one before
    assert call_all(ranks, shared.is_kept_buffer_unchanged) == [True, True]
    assert call_all(ranks, shared.segments) == [1, 1]
