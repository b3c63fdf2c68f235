"""How the rows of a step follow the speed of the ranks, in worlds that are simulated step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from spark_elastic.data.plan import Division
from spark_elastic.training.row_balancer import MIN_STEPS, STRAGGLER_WINDOWS, WINDOW, RowBalancer

ROWS = 256
# Seconds of one step, by the parts of each rank.
Model = Callable[[Sequence[int], random.Random], list[float]]


def at_speeds(*speeds: float, fixed: float = 0.0, noise: float = 0.0) -> Model:
    """Rows per second of each rank. fixed: seconds of a step that do not depend on its rows."""

    def take(parts: Sequence[int], rng: random.Random) -> list[float]:
        pairs = zip(parts, speeds, strict=True)
        return [(fixed + count / speed) * rng.uniform(1 - noise, 1 + noise) for count, speed in pairs]

    return take


class Quota:
    """The last rank may use a part of each period of 0.1 s, as a control group's quota has it, and stands still
    otherwise. While it waits for others it uses nothing."""

    def __init__(self, part: float, speeds: Sequence[float], fixed: float = 0.0) -> None:
        """fixed: seconds of a step that do not depend on its rows."""
        self.part, self.speeds, self.fixed = part, speeds, fixed
        self.now, self.used = 0.0, 0.0

    def __call__(self, parts: Sequence[int], rng: random.Random) -> list[float]:
        seconds = [self.fixed + count / speed for count, speed in zip(parts, self.speeds, strict=True)]
        seconds[-1] = self._run(seconds[-1])
        self._advance(self.now + max(seconds))
        return seconds

    def _run(self, work: float) -> float:
        at, used = self.now, self.used
        period = int(at / 0.1)
        while work > 1e-12:
            if int(at / 0.1) != period:
                period, used = int(at / 0.1), 0.0
            can = min(work, 0.1 * self.part - used, (period + 1) * 0.1 - at)
            if can > 1e-12:
                at, used, work = at + can, used + can, work - can
            else:
                at = (period + 1) * 0.1 + 1e-9
        self._left = int(at / 0.1), used
        return at - self.now

    def _advance(self, until: float) -> None:
        self.now, self.used = until, self._left[1] if int(until / 0.1) == self._left[0] else 0.0


def simulate(
    model: Model, seconds: float, balancer: RowBalancer, seed: int = 1
) -> list[tuple[float, list[int]]]:
    """(when, parts) of each division."""
    rng, now, taken = random.Random(seed), 0.0, [(0.0, balancer.parts)]
    steps = 0
    while now < seconds:
        worked = model(balancer.parts, rng)
        now, steps = now + max(worked), steps + 1
        if balancer.add(worked):
            taken.append((now, balancer.parts))
    simulate.speed = steps * ROWS / now  # type: ignore[attr-defined]
    return taken


def rate(model: Model, seconds: float, balancer: RowBalancer) -> float:
    """Rows per second of that time, the search for the division included."""
    simulate(model, seconds, balancer)
    return float(simulate.speed)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "speeds", [(4000.0, 1000.0), (4000.0, 4000.0, 1000.0), (1000.0, 2000.0, 3000.0, 4000.0)]
)
def test_rows_follow_the_speed_of_the_ranks(speeds: tuple[float, ...]) -> None:
    balancer = RowBalancer(ROWS, len(speeds))
    taken = simulate(at_speeds(*speeds, noise=0.1), 30.0, balancer)
    ideal = [ROWS * speed / sum(speeds) for speed in speeds]
    assert all(abs(found - wanted) < 0.1 * wanted for found, wanted in zip(taken[-1][1], ideal, strict=True))
    assert taken[1][0] < 4 * WINDOW, "it takes two windows"
    assert rate(at_speeds(*speeds, noise=0.1), 60.0, RowBalancer(ROWS, len(speeds))) > 0.9 * sum(speeds)


@pytest.mark.parametrize("seed", range(6))
def test_equal_ranks_keep_the_equal_division(seed: int) -> None:
    balancer = RowBalancer(ROWS, 3)
    assert simulate(at_speeds(3e3, 3e3, 3e3, noise=0.3), 60.0, balancer, seed) == [(0.0, balancer.parts)]


@pytest.mark.parametrize(
    ("speed", "fixed"),
    [
        *((ROWS / slow, 0.0) for slow in (1.0, 0.5, 0.25)),  # few rows look as quick as the other's
        *((8e3, fixed) for fixed in (0.0, 0.001, 0.003)),  # several steps are in a period
    ],
)
def test_a_processor_quota_of_a_quarter_leaves_nine_tenths_of_its_rate(speed: float, fixed: float) -> None:
    """On average the rank may look quicker than the other, which waits for it in some steps. fixed: seconds of each."""
    best = min(max(fixed + (ROWS - own) / speed, 4 * (fixed + own / speed)) for own in range(ROWS))
    assert rate(Quota(0.25, (speed, speed), fixed), 120.0, RowBalancer(ROWS, 2)) > 0.9 * ROWS / best


def test_a_rank_that_recovers_gets_its_rows_back() -> None:
    balancer = RowBalancer(ROWS, 2)
    simulate(at_speeds(4e3, 1e3), 20.0, balancer)
    assert balancer.parts[0] > 3 * balancer.parts[1]
    simulate(at_speeds(4e3, 4e3), 20.0, balancer)
    assert balancer.division == Division.equal(2)


def test_a_change_that_does_not_help_is_taken_back() -> None:
    """More than half of the rows cost this rank a second pass."""

    def take(parts: Sequence[int], rng: random.Random) -> list[float]:
        return [0.05 + 0.05 * (parts[0] > ROWS // 2), 0.08]

    balancer = RowBalancer(ROWS, 2)
    taken = simulate(take, 60.0, balancer)
    assert rate(take, 60.0, RowBalancer(ROWS, 2)) > 0.95 * ROWS / 0.08
    tries = [when for when, parts in taken if parts != [ROWS // 2] * 2]
    assert [b - a for a, b in pairwise(tries)] == sorted(b - a for a, b in pairwise(tries)), "rarer and rarer"


@pytest.mark.parametrize(
    ("rows", "shares", "speeds", "parts"),
    [
        (16, 0, (1e3, 1.0), [14, 2]),  # as few as statistics need
        (8, 8, (40.0, 40.0, 10.0), [4, 3, 1]),  # virtual shares are divided whole
    ],
)
def test_slow_ranks_keep_a_part(rows: int, shares: int, speeds: tuple[float, ...], parts: list[int]) -> None:
    balancer = RowBalancer(rows, len(speeds), shares=shares)
    assert balancer.division == Division.equal(len(speeds), shares)
    simulate(at_speeds(*speeds), 60.0, balancer)
    assert balancer.parts == parts


def test_a_rank_that_keeps_others_waiting_whatever_it_is_given_is_a_straggler() -> None:
    balancer, seconds = RowBalancer(ROWS, 3), at_speeds(4e3, 4e3, 10.0)
    simulate(seconds, 10.0, balancer)
    assert balancer.straggler is None, "not at once"
    simulate(seconds, STRAGGLER_WINDOWS * 10.0, balancer)
    assert balancer.straggler == 2
    slow_but_useful = RowBalancer(ROWS, 3), at_speeds(4e3, 4e3, 1e3)
    as_slow_as_any = RowBalancer(8, 8, shares=8), at_speeds(*[20.0] * 7, 10.0)  # for its share of them
    for balancer, seconds in (slow_but_useful, as_slow_as_any):
        simulate(seconds, 60.0, balancer)
        assert balancer.straggler is None


def test_steps_that_were_not_measured_do_not_count() -> None:
    balancer = RowBalancer(ROWS, 2)
    for _ in range(10 * MIN_STEPS):
        assert not balancer.add((1.0, 0.0))
    assert not balancer.add(())
    assert balancer.division == Division.equal(2)
