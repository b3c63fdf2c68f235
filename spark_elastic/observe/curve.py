"""What rank 0 reports over time, in bounded memory: the speed of a run, and curves that are thinned as they grow.

Pure: times are arguments, seconds since the launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 600
SPEED_OVER = 5.0  # seconds


@dataclass(frozen=True)
class CurvePoint:
    """step: applied steps of the whole run. rows_per_second: of the whole world, 0 while unknown. loss: None where
    the program reports none."""

    at: float
    step: int
    loss: float | None
    rows_per_second: float
    world: int


class Curve:
    """At most `most` points; when there are more, each two neighbours become one."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._stride = 1  # reports that make one point
        self._pending: list[CurvePoint] = []
        self._points: list[CurvePoint] = []

    def add(self, point: CurvePoint) -> None:
        self._pending.append(point)
        if len(self._pending) < self._stride:
            return
        self._points.append(_merged(self._pending))
        self._pending.clear()
        if len(self._points) > self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_merged([first, second]) for first, second in pairs]
            self._stride *= 2

    @property
    def points(self) -> tuple[CurvePoint, ...]:
        return (*self._points, *self._pending[-1:])


def _merged(points: list[CurvePoint]) -> CurvePoint:
    """Means of loss and speed; the rest is the last one's."""
    last = points[-1]
    losses = [point.loss for point in points if point.loss is not None]
    loss = sum(losses) / len(losses) if losses else None
    speed = sum(point.rows_per_second for point in points) / len(points)
    return CurvePoint(last.at, last.step, loss, speed, last.world)


class Speed:
    """Rows and steps a second over the last seconds, from reports with `epoch`, `step`, `steps` and `rows`."""

    def __init__(self, over: float = SPEED_OVER) -> None:
        self._over = over
        self._seen: deque[tuple[float, int]] = deque()
        self._rows = 0.0
        self._left: int | None = None

    def add(self, at: float, numbers: Mapping[str, Any]) -> None:
        done = steps_done(numbers)
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # taken back to a checkpoint
        self._seen.append((at, done))
        while len(self._seen) > 2 and at - self._seen[0][0] > self._over:
            self._seen.popleft()
        self._rows = float(numbers.get("rows", 0) or 0)
        epochs, steps = numbers.get("epochs"), numbers.get("steps")
        self._left = int(epochs) * int(steps) - done if epochs and steps else None

    def stands_still(self, at: float) -> bool:
        """Whether reports stay away: for longer than a window, and than thrice what lay between those before."""
        if not self._seen:
            return True
        usual = (self._seen[-1][0] - self._seen[0][0]) / max(1, len(self._seen) - 1)
        return at - self._seen[-1][0] > max(self._over, 3 * usual)

    @property
    def steps_per_second(self) -> float:
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return 0.0
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first)

    @property
    def rows_per_second(self) -> float:
        """`rows` of a report are those of one step."""
        return self.steps_per_second * self._rows

    @property
    def seconds_left(self) -> float | None:
        """None while it cannot be told."""
        speed = self.steps_per_second
        return None if self._left is None or speed <= 0 else self._left / speed


def steps_done(numbers: Mapping[str, Any]) -> int:
    """Applied steps of the whole run, as far as the report tells."""
    return int(numbers.get("epoch", 0)) * int(numbers.get("steps", 0)) + int(numbers.get("step", 0))
