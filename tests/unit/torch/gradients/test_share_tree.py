"""The order in which the gradients of virtual shares are added, on numbers whose sums depend on it."""

from __future__ import annotations

import random

import pytest

from spark_elastic.data.plan import share_range
from spark_elastic.torch.gradients.share_tree import plan_shares


def add_up(numbers: list[float], size: int) -> float:
    """As the ranks of a world do; the collective adds what lies in a slot in any order."""
    shares = len(numbers)
    trees = [plan_shares(shares, rank, size) for rank in range(size)]
    slots: list[list[float]] = [[] for _ in range(trees[0].slot_count)]
    for rank, tree in enumerate(trees):
        stack: list[float] = []
        for share, additions in zip(range(*share_range(shares, rank, size)), tree.additions, strict=True):
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
def test_the_sum_has_the_same_bits_for_any_number_of_ranks(shares: int) -> None:
    rng = random.Random(shares)
    numbers = [rng.gauss(0.0, 1.0) * 10.0 ** rng.randint(-9, 9) for _ in range(shares)]
    assert len({add_up(numbers, size).hex() for size in range(1, shares + 1)}) == 1
    assert shares < 7 or add_up(numbers, 1) != sum(numbers), "these numbers have the same sum in any order"


def test_the_slots_of_eight_shares() -> None:
    """One rank, and two, exchange as much as without shares; later ones need more memory."""
    assert [plan_shares(8, 0, size).slot_count for size in range(1, 9)] == [1, 1, 3, 2, 3, 4, 4, 4]
