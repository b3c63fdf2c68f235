"""Gradients of virtual shares: added in one order, the same bits in any world, and what a loop must do with them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import nn

from elastic_collectives import Group, MismatchError
from spark_elastic.data.plan import Division, compute_rank_shares
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.reduction import ExchangeOptions
from spark_elastic.gradients.share_mode import plan_shares
from tests.worlds import run_in_world

SHARES, STEPS = 7, 2  # no power of two: subtrees of several sizes
OPTIONS = ExchangeOptions(shares=SHARES, sparse="sparse", bucket_bytes=256)


class Net(nn.Module):
    """A layer that some shares leave out, one that all leave out, and sparse rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(9, 4, sparse=True)
        self.always, self.sometimes, self.never = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, share: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(share)
        x = self.always(self.words(torch.randint(0, 9, (5,), generator=drawn)))
        return (self.sometimes(x) if share % 3 == 1 else x).tanh().square().sum()  # type: ignore[no-any-return]


NET = Net()  # copied by ranks that are threads, which share torch's generator


def take_steps(group: Group, passes: int = 1) -> list[torch.Tensor | None]:
    """The gradients of the last step; in a world's first step sparse rows have a place in a bucket, too."""
    net, (first, past) = copy.deepcopy(NET), compute_rank_shares(SHARES, group.rank, group.size)
    with closing(GradientExchange(net.named_parameters(), OPTIONS)) as exchange:
        for _ in range(STEPS):
            exchange.clear_and_begin(group, passes)
            for share in range(first, past):
                exchange.begin_share()
                for _ in range(passes):
                    (net(share) / 3).backward()
                exchange.end_share()
            exchange.finish()
            exchange.adopt_sparse_parameters(exchange.mode.found_sparse)
            exchange.drop_absent(exchange.mode.present)
        return [p.grad if p.grad is None else p.grad.clone() for p in net.parameters()]


def bits(gradient: torch.Tensor | None) -> bytes | None:
    if gradient is None:
        return None
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.numpy().tobytes()


@pytest.mark.native
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_have_the_same_bits_in_any_world(passes: int) -> None:
    (alone,) = run_in_world(1, lambda group: take_steps(group, passes))
    assert alone[0] is not None
    assert alone[0].is_sparse
    for size in range(2, SHARES + 1):
        for gradients in run_in_world(size, lambda group: take_steps(group, passes)):
            # What this rank's shares leave out it learns with the step summary, which is not part of this test.
            pairs = zip(map(bits, gradients), map(bits, alone), strict=True)
            assert all(mine in (None, whole) for mine, whole in pairs)


@pytest.mark.native
def test_ranks_that_compute_otherwise_are_refused() -> None:
    def work(group: Group) -> None:
        net = nn.Linear(5, 3)
        options = ExchangeOptions(shares=2, arithmetic=["AVX2", "AVX512"][group.rank])
        with closing(GradientExchange(net.named_parameters(), options)) as exchange:
            exchange.clear_and_begin(group, 1)
            exchange.begin_share()
            net(torch.ones(2, 5)).sum().backward()
            exchange.end_share()
            with pytest.raises(MismatchError, match=r"computed with AVX2, .* on rank 1, .* with AVX512"):
                exchange.finish()

    run_in_world(2, work)


def leave_out_a_share(net: nn.Linear, exchange: GradientExchange) -> None:
    exchange.finish()


def change_gradient(net: nn.Linear, exchange: GradientExchange) -> None:
    exchange.begin_share()
    net(torch.ones(2, 5)).sum().backward()
    exchange.end_share()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    exchange.finish()


def pass_twice(net: nn.Linear, exchange: GradientExchange) -> None:
    exchange.begin_share()
    for _ in range(2):
        net(torch.ones(2, 5)).sum().backward()


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (leave_out_a_share, "called before the last virtual share"),
        (change_gradient, r"call optimizer.synchronize\(\) before they are clipped"),
        (pass_twice, "came more than 1 times in one virtual share"),
    ],
)
def test_what_a_loop_must_not_do(work: Callable[[nn.Linear, GradientExchange], None], sentence: str) -> None:
    net = nn.Linear(5, 3)
    with closing(GradientExchange(net.named_parameters(), ExchangeOptions(shares=1))) as exchange:
        exchange.clear_and_begin(None, 1)
        with pytest.raises(InvalidInput, match=sentence):
            work(net, exchange)


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
    told = "these numbers have the same sum in any order"
    assert shares < 7 or add_up(numbers, divisions[0]) != sum(numbers), told


def test_the_slots_of_eight_shares() -> None:
    """One rank, and two, exchange as much as without shares; later ones need more memory."""
    trees = [plan_shares(Division.equal(size, 8), 0) for size in range(1, 9)]
    assert [tree.slot_count for tree in trees] == [1, 1, 3, 2, 3, 4, 4, 4]
