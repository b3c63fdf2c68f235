"""What collectives compute, on real processes, in worlds of one to five."""

from __future__ import annotations

import pytest

from tests.component.collectives import calls
from tests.component.collectives.ranks import Pool, answers, call_all


@pytest.mark.parametrize("size", range(1, 9))
def test_r07_reductions_are_right_and_equal_bit_by_bit(pool: Pool, size: int) -> None:
    ranks = pool.take(size)
    pool.world(ranks)
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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_other_collective_is_right(pool: Pool, size: int) -> None:
    ranks = pool.take(size)
    pool.world(ranks)
    assert call_all(ranks, calls.check_other_collectives) == [[]] * size


@pytest.mark.timeout(300)
def test_a_thousand_generations_on_one_endpoint_leak_nothing(pool: Pool) -> None:
    ranks = pool.take(3)
    first = max(next(pool.generations) for _ in range(1000)) - 999
    everybody = [rank.address for rank in ranks]
    for number, rank in enumerate(ranks):
        rank.call(calls.rebuild, everybody, number, first, 1000)
    for answer in answers(ranks):
        early, late = answer
        assert late["descriptors"] <= early["descriptors"] + 2  # a neighbour's hello may just be coming in
        assert late["threads"] == early["threads"]
        assert late["bytes"] < early["bytes"] + (4 << 20)
