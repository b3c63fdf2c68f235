"""Divides the rows of a step among the ranks of a world by their measured speed.

Every rank has one and feeds it with the same numbers, R6 (step summary), so all change the division after the same
step, whose rows stay the same (P1, P2). PURE: no clock, no group. Training thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from spark_elastic.data.plan import Division

WINDOW = 0.5  # seconds of steps that are judged together: several periods of a processor quota
MIN_STEPS = 4  # of a window
CONFIRMATIONS = 2  # windows in a row that must ask for a change
FIRST_GAIN, NEXT_GAIN = 0.15, 0.05  # of a step's time: away from the equal division, and afterwards
# A rank that has less than an equal part gets at most so many times its rows in one change: that a processor quota is
# no limit at few rows says nothing about more of them.
MAX_GROWTH = 1.25
MAX_PATIENCE = 32  # windows to wait after changes that did not help
WORSENING = 1.25  # a step that takes so many times as long ends that wait
MIN_FRACTION = 1 / 16  # of an equal part, which each rank keeps
# Windows in a row in which the other ranks alone would have been quicker by STRAGGLER_GAIN: the rank is a straggler.
STRAGGLER_WINDOWS, STRAGGLER_GAIN = 20, 0.2


class RowBalancer:
    """The division of the steps of one world. `add` each applied step; then `division` is that of the next one."""

    def __init__(self, parts: int, size: int, shares: int = 0) -> None:
        """parts: rows of a step, or its virtual shares; at least `size`. shares: its virtual shares, 0 without them."""
        self._total, self._size = parts, size
        self._equal, self._equal_parts = Division.equal(size, shares), Division.equal(size, parts).parts
        self.parts = self._equal_parts  # by rank
        # BatchNorm cannot train on a single row.
        self._least = 1 if shares else max(min(2, parts // size), int(parts // size * MIN_FRACTION), 1)
        self.straggler: int | None = None  # without which the others are quicker for some time
        self._straggler_windows = 0
        self._asked = 0  # windows in a row that asked for a change
        self._former: tuple[list[int], float] | None = None  # (parts, seconds) that are still judged
        self._patience, self._waits = 1, 0  # windows: of the next wait, and left of this one
        self._accepted = 0.0  # seconds of a step when this wait began
        self._begin_window()

    @property
    def division(self) -> Division:
        equal = self.parts == self._equal_parts
        return self._equal if equal else Division((0, *accumulate(self.parts)))

    def _begin_window(self) -> None:
        self._steps: list[Sequence[float]] = []  # of this window: seconds by rank
        self._longest = 0.0  # sum over them of the slowest rank's

    def add(self, seconds: Sequence[float]) -> bool:
        """Add the seconds that each rank worked for a step, 0.0: not measured. Returns whether the division changed."""
        if min(seconds, default=0.0) <= 0.0:
            return False
        self._steps.append(seconds)
        self._longest += max(seconds)
        if len(self._steps) < MIN_STEPS or self._longest < WINDOW:
            return False
        means, step_seconds = _weigh(self._steps), self._longest / len(self._steps)
        self._begin_window()
        before = self.parts
        self._judge(means, step_seconds)
        return self.parts != before

    def _judge(self, means: list[float], step_seconds: float) -> None:
        """Judge a window. step_seconds: the mean over its steps of the slowest rank's time."""
        if self._former is not None:
            (counts, before), self._former = self._former, None
            if step_seconds >= before:
                self.parts, self._accepted = counts, before
                self._waits, self._patience = self._patience, min(2 * self._patience, MAX_PATIENCE)
                return
            self._patience = 1
        self._watch_slowest(means)
        if self._waits and step_seconds < WORSENING * self._accepted:
            self._waits -= 1
            return
        self._waits = 0
        wanted = self._find_better(means)
        self._asked = 0 if wanted is None else self._asked + 1
        if wanted is not None and self._asked >= CONFIRMATIONS:
            self._former, self.parts, self._asked = (self.parts, step_seconds), wanted, 0

    def _find_better(self, means: list[float]) -> list[int] | None:
        """Parts by rank that are expected to be quicker by enough, if there are. means: seconds of a step, by rank."""
        counts, equal = self.parts, self._equal_parts
        speeds = [count / mean for count, mean in zip(counts, means, strict=True)]
        pairs = list(zip(counts, equal, strict=True))
        most = [max(n + 1, int(n * MAX_GROWTH)) if n < each else self._total for n, each in pairs]
        chosen = _allot(self._total, speeds, self._least, most)
        expected, as_equal = _compute_longest(chosen, speeds), _compute_longest(equal, speeds)
        within = all(each <= limit for each, limit in zip(equal, most, strict=True))
        if within and as_equal <= expected * (1 + NEXT_GAIN):
            chosen, expected = equal, as_equal
        needed = FIRST_GAIN if counts == equal else NEXT_GAIN
        return None if chosen == counts or expected > (1 - needed) * max(means) else chosen

    def _watch_slowest(self, means: list[float]) -> None:
        """Notice a rank that keeps the others waiting whatever it is given."""
        slowest = max(range(self._size), key=means.__getitem__)
        speeds = [count / mean for count, mean in zip(self.parts, means, strict=True)]
        del speeds[slowest]
        chosen = _allot(self._total, speeds, self._least, [self._total] * len(speeds))
        if _compute_longest(chosen, speeds) > (1 - STRAGGLER_GAIN) * means[slowest]:
            self._straggler_windows, self.straggler = 0, None
            return
        self._straggler_windows += 1
        if self._straggler_windows >= STRAGGLER_WINDOWS:
            self.straggler = slowest


def _weigh(steps: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of a step by rank: the mean, but nearer to the world's own the more the steps wait for that rank alone. A
    step takes as long as its slowest rank. A processor quota stops a rank for long in one step out of several: its mean
    may be the smallest, although that rank alone decides how many steps there are in a second. So the rank with all of
    the time by which slowest ranks exceed their own means is taken to need a whole step of the world."""
    means = [sum(column) / len(steps) for column in zip(*steps, strict=True)]
    above = [0.0] * len(means)
    for seconds in steps:
        slowest = max(range(len(means)), key=seconds.__getitem__)
        above[slowest] += max(0.0, seconds[slowest] - means[slowest])
    world, total = sum(map(max, steps)) / len(steps), sum(above) or 1.0
    return [mean + (world - mean) * each / total for mean, each in zip(means, above, strict=True)]


def _compute_longest(parts: Sequence[int], speeds: Sequence[float]) -> float:
    return max(count / speed for count, speed in zip(parts, speeds, strict=True))


def _allot(parts: int, speeds: Sequence[float], least: int, most: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the speeds that add up to `parts`, each from `least` to its `most`."""
    fixed: dict[int, int] = {}
    while True:
        free = [rank for rank in range(len(speeds)) if rank not in fixed]
        left = parts - sum(fixed.values())
        total = 0.0
        for rank in free:
            total += speeds[rank]
        ideal = {rank: left * speeds[rank] / total for rank in free}
        # Those that are too low first: what they take lowers the others.
        bound = {rank: least for rank in free if ideal[rank] < least}
        bound = bound or {rank: most[rank] for rank in free if ideal[rank] > most[rank]}
        if not bound or len(bound) == len(free):
            break
        fixed |= bound
    chosen = [fixed.get(rank, max(least, int(ideal.get(rank, 0.0)))) for rank in range(len(speeds))]
    while sum(chosen) < parts:
        chosen[min(free, key=lambda rank: ((chosen[rank] + 1) / speeds[rank], rank))] += 1
    while sum(chosen) > parts:
        lowered = [rank for rank, count in enumerate(chosen) if count > least]
        chosen[max(lowered, key=lambda rank: (chosen[rank] / speeds[rank], rank))] -= 1
    return chosen
