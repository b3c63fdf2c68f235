"""The order in which the gradients of virtual shares are added, on numbers whose sums depend on it."""

from __future__ import annotations

import random

import pytest

from spark_elastic.data.plan import Division
from spark_elastic.gradients.share_tree import plan_shares


def add_up(numbers: list[float], division: Division) -> float:
    """As the ranks of a world do; the collective adds what lies in a slot in any order."""
    trees = [plan_shares(division, rank) for rank in range(division.size)]
    slots: list[list[float]] = [[] for _ in range(trees[0].slot_count)]
    for rank, tree in enumerate(trees):
        stack: list[float] = []
        for share, additions in zip(range(*division.get_rank_parts(rank)), tree.additions, strict=True):
            stack.append(numbers[share])
            for _ in range(additions):
                upper = stack.pop()
                stack[-1] += upper
            assert len(stack) <= tree.depth
        for slot, number in zip(tree.slots, stack, strict=True):
            slots[slot].append(number)
    assert {len(each) for each in slots} <= {1, 2}, "a sum of three numbers depends on their order"
    sums = [sum(each) for each in slots]
    for into, source in trees[0].slot_additions:
        sums[into] += sums[source]
    return sums[0]


@pytest.mark.parametrize("shares", [1, 2, 7, 8, 13])
def test_the_sum_has_the_same_bits_for_any_number_of_ranks_and_any_division(shares: int) -> None:
    rng = random.Random(shares)
    numbers = [rng.gauss(0.0, 1.0) * 10.0 ** rng.randint(-9, 9) for _ in range(shares)]
    divisions = [Division.equal(size, shares) for size in range(1, shares + 1)]
    for size in range(2, shares + 1):
        cuts = sorted(rng.sample(range(1, shares), size - 1))
        divisions.append(Division((0, *cuts, shares)))
    assert len({add_up(numbers, division).hex() for division in divisions}) == 1
    assert shares < 7 or add_up(numbers, divisions[0]) != sum(numbers), (
        "these numbers have the same sum in any order"
    )


def test_the_slots_of_eight_shares() -> None:
    """One rank, and two, exchange as much as without shares; later ones need more memory."""
    assert [plan_shares(Division.equal(size, 8), 0).slot_count for size in range(1, 9)] == [
        1,
        1,
        3,
        2,
        3,
        4,
        4,
        4,
    ]
