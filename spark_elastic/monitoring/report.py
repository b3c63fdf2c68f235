"""The report of a job: where its time went, what losses cost, and which rows were trained. Pure values.

Made by `JobHistory.report`; a fitted model keeps it as JSON. Knows neither the driver nor a framework.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from spark_elastic.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# What rank 0 reports over time, in bounded memory: the speed of a run, and curves that are thinned as they grow.
#
# Pure: times are arguments, seconds since the launch.


MOST_POINTS = 600
SPEED_OVER = 5.0  # seconds


@dataclass(frozen=True)
class MetricPoint:
    """step: applied steps of the whole run. rows_per_second: of the whole world, 0 while unknown. loss: None where
    the program reports none."""

    at: float
    step: int
    loss: float | None
    rows_per_second: float
    world: int


class MetricSeries:
    """At most `most` points; when there are more, each two neighbours become one."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._stride = 1  # reports that make one point
        self._pending: list[MetricPoint] = []
        self._points: list[MetricPoint] = []

    def add(self, point: MetricPoint) -> None:
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
    def points(self) -> tuple[MetricPoint, ...]:
        return (*self._points, *self._pending[-1:])


def _merged(points: list[MetricPoint]) -> MetricPoint:
    """Means of loss and speed; the rest is the last one's."""
    last = points[-1]
    losses = [point.loss for point in points if point.loss is not None]
    loss = sum(losses) / len(losses) if losses else None
    speed = sum(point.rows_per_second for point in points) / len(points)
    return MetricPoint(last.at, last.step, loss, speed, last.world)


class Throughput:
    """Rows and steps a second over the last seconds, from reports with `epoch`, `step`, `steps` and `rows`."""

    def __init__(self, over: float = SPEED_OVER) -> None:
        self._over = over
        self._seen: deque[tuple[float, int]] = deque()
        self._rows = 0.0
        self._left: int | None = None

    def add(self, at: float, numbers: Mapping[str, Any]) -> None:
        done = count_steps(numbers)
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # taken back to a checkpoint
        self._seen.append((at, done))
        while len(self._seen) > 2 and at - self._seen[0][0] > self._over:
            self._seen.popleft()
        self._rows = float(numbers.get("rows", 0) or 0)
        epochs, steps = numbers.get("epochs"), numbers.get("steps")
        self._left = int(epochs) * int(steps) - done if epochs and steps else None

    def is_stalled(self, at: float) -> bool:
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


def count_steps(numbers: Mapping[str, Any]) -> int:
    """Applied steps of the whole run, as far as the report tells."""
    return int(numbers.get("epoch", 0)) * int(numbers.get("steps", 0)) + int(numbers.get("step", 0))


# A change of the world as people want it told: what happened, why, and what it cost. Pure.


class WorldChangeKind(Enum):
    """What led to a world."""

    START = "start"
    LOSS = "loss"  # a member was lost, others go on
    PLANNED = "planned"  # members joined or left at a step boundary
    RESTART = "restart"  # nobody of the last world was left


UNPLANNED = (WorldChangeKind.LOSS, WorldChangeKind.RESTART)


@dataclass(frozen=True)
class WorldChange:
    """at: seconds since the launch at which it was published. before: size of the world that it follows.

    seconds: for how long nobody trained, until every member had built this world; None: it was never built.
    steps_lost: applied steps that are taken once more.
    """

    generation: int
    at: float
    kind: WorldChangeKind
    before: int
    size: int
    joined: int
    left: int
    reason: str
    seconds: float | None = None
    steps_lost: int = 0

    def __str__(self) -> str:
        """One line: what happened and what it cost."""
        cost = "" if self.seconds is None else f" in {self.seconds:.2f} s"
        return f"world of {self.size}: {self._what()}{cost}{self._steps()} ({self.reason})"

    def _what(self) -> str:
        match self.kind:
            case WorldChangeKind.START:
                return "started"
            case WorldChangeKind.LOSS:
                return f"{self.left} of {self.before} lost, recovered"
            case WorldChangeKind.RESTART:
                return f"all {self.before} lost, started again"
        moves = [(self.joined, "joined"), (self.left, "left as planned")]
        return ", ".join(f"{count} {word}" for count, word in moves if count) or "formed anew"

    def _steps(self) -> str:
        if self.kind not in UNPLANNED:
            return ""
        return f", {self.steps_lost or 'no'} step{'' if self.steps_lost == 1 else 's'} lost"


PHASES = ("start", "training", "recovery", "planned", "closing")


@dataclass(frozen=True)
class EpochRows:
    """How many rows of one epoch entered an applied step (`seen`), and how many fewer (`missing`) or more (`duplicated`)
    than planned that is. These are counts; `ledger=True` records the ids of the rows."""

    epoch: int
    seen: int
    missing: int
    duplicated: int


@dataclass(frozen=True)
class JobReport:
    """seconds: the whole job. phases: seconds of each of PHASES: until the first world was complete; while a world
    trained; while nobody trained because of losses, or because of planned changes; after the first worker was done.

    checkpoint_seconds: how long checkpoints, including the copy of the state, held up training. reserved_hours,
    useful_hours: of all slots, and of all workers while their world trained. curve: thinned.
    """

    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    world_changes: tuple[WorldChange, ...] = ()
    curve: tuple[MetricPoint, ...] = ()
    checkpoints: int = 0
    checkpoint_seconds: float = 0.0
    reserved_hours: float = 0.0
    useful_hours: float = 0.0
    epochs: tuple[EpochRows, ...] = ()

    @property
    def goodput(self) -> float:
        """The part of the job's time, from launch to end, when a whole world trained, less what checkpoints took."""
        useful = self.phases.get("training", 0.0) - self.checkpoint_seconds
        return max(0.0, useful) / self.seconds if self.seconds > 0 else 0.0

    @property
    def recoveries(self) -> tuple[WorldChange, ...]:
        """Worlds that followed a loss."""
        return tuple(change for change in self.world_changes if change.kind in UNPLANNED)

    @property
    def steps_lost(self) -> int:
        return sum(change.steps_lost for change in self.world_changes)

    def recovery_seconds(self, percent: float) -> float | None:
        """The percentile (nearest rank) of the recoveries' durations; None if there was none."""
        known = sorted(change.seconds for change in self.recoveries if change.seconds is not None)
        return known[max(0, math.ceil(percent / 100 * len(known)) - 1)] if known else None

    def with_rows(self, history: Iterable[Mapping[str, Any]], data_rows: int) -> JobReport:
        """With the rows of each epoch: `history` has `epoch` and `rows`, counted by the state of the final weights, and
        `planned`, for the steps taken; without it `data_rows` were planned."""
        epochs = tuple(
            _epoch(int(entry["epoch"]), int(entry["rows"]), int(entry.get("planned", data_rows)))
            for entry in history
        )
        return dataclasses.replace(self, epochs=epochs)

    def plot(self) -> Figure:
        """Loss, throughput and world size over time. Needs matplotlib.

        Raises:
            InvalidInput: matplotlib is not installed.
        """

        return draw_report(self)

    def to_json(self) -> str:
        values = dataclasses.asdict(self)
        for change in values["changes"]:
            change["kind"] = change["kind"].value
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> JobReport:
        values = json.loads(text)
        changes = [
            WorldChange(**{**change, "kind": WorldChangeKind(change["kind"])})
            for change in values.pop("changes")
        ]
        curve = tuple(MetricPoint(**point) for point in values.pop("curve"))
        epochs = tuple(EpochRows(**epoch) for epoch in values.pop("epochs"))
        return cls(changes=tuple(changes), curve=curve, epochs=epochs, **values)

    def __str__(self) -> str:
        """A few lines for people."""
        shares = ", ".join(f"{name} {self.phases.get(name, 0.0):.1f} s" for name in PHASES)
        lines = [f"goodput {self.goodput:.1%} of {self.seconds:.1f} s: {shares}"]
        if self.recoveries:
            p50, p99 = self.recovery_seconds(50), self.recovery_seconds(99)
            took = "" if p50 is None or p99 is None else f", p50 {p50:.2f} s, p99 {p99:.2f} s"
            lines.append(f"recoveries: {len(self.recoveries)}{took}; steps lost: {self.steps_lost}")
        else:
            lines.append("no losses")
        lines.append(
            f"checkpoints: {self.checkpoints}, which held up training for {self.checkpoint_seconds:.2f} s"
        )
        lines.append(f"worker-hours: {self.reserved_hours:.3f} reserved, {self.useful_hours:.3f} useful")
        lines += [
            f"epoch {rows.epoch + 1}: {rows.seen} rows, {rows.missing} missing, {rows.duplicated} duplicated"
            for rows in self.epochs
        ]
        return "\n".join(lines)


def _epoch(epoch: int, seen: int, due: int) -> EpochRows:
    return EpochRows(epoch, seen, max(0, due - seen), max(0, seen - due))


# A report as a picture: loss, throughput and world size over time, with losses marked. matplotlib is optional.


def draw_report(report: JobReport) -> Figure:
    """Three plots over one axis of seconds since the launch. Touches neither pyplot nor any window.

    Raises:
        InvalidInput: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("plot() needs matplotlib: pip install matplotlib.") from error
    made = Figure(figsize=(8, 6), layout="constrained")
    loss, rate, world = made.subplots(3, 1, sharex=True)
    known = [point for point in report.curve if point.loss is not None]
    loss.plot([point.at for point in known], [point.loss for point in known], color="tab:blue")
    loss.set_ylabel("loss")
    rate.plot(
        [point.at for point in report.curve],
        [point.rows_per_second for point in report.curve],
        color="tab:green",
    )
    rate.set_ylabel("rows/s")
    _steps(world, report)
    for axes in (loss, rate, world):
        for change in report.recoveries:
            axes.axvline(change.at, color="tab:red", alpha=0.4, linewidth=1)
    return made


def _steps(axes: Any, report: JobReport) -> None:
    times = [change.at for change in report.world_changes]
    sizes = [change.size for change in report.world_changes]
    if times:
        axes.step(
            [*times, max(report.seconds, times[-1])], [*sizes, sizes[-1]], where="post", color="tab:orange"
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("workers")
    axes.set_xlabel("seconds since the launch")
