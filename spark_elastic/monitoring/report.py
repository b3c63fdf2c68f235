"""The report of a job: where its time went, what losses cost, and how many rows were trained; and a job's page.

`JobHistory` makes a report; a fitted model keeps it as JSON. The page is HTML that loads nothing from elsewhere: a live
one asks its server every second, a saved one holds its data. Values only; times are seconds since the launch."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from spark_elastic.checks import require_package
from spark_elastic.rendezvous import codec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 600  # of a metric series
THROUGHPUT_WINDOW = 5.0  # seconds
PHASES = ("start", "training", "recovery", "planned", "closing")
MAX_TEXT = 4000  # characters of a message or a stack on a page
_SCRIPT = "<script>"  # the only one of the page


@dataclass(frozen=True)
class MetricPoint:
    """What rank 0 reported at one time."""

    at: float  # seconds since the launch
    step: int  # applied steps of the whole run
    loss: float | None  # None if the program reports none
    rows_per_second: float  # of the whole world; 0 while unknown
    world: int  # number of workers


class MetricSeries:
    """Metric points in bounded memory: whenever there are more than `max_points`, each two neighbours become one."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._stride = 1  # number of reports that are merged into one point
        self._pending: list[MetricPoint] = []
        self._points: list[MetricPoint] = []

    def add(self, point: MetricPoint) -> None:
        self._pending.append(point)
        if len(self._pending) < self._stride:
            return
        self._points.append(_merge_points(self._pending))
        self._pending.clear()
        if len(self._points) > self._max_points:
            points, even = self._points, len(self._points) // 2 * 2
            self._points = [_merge_points(points[i : i + 2]) for i in range(0, even, 2)]
            self._pending = points[even:] * self._stride  # it stands for so many reports
            self._stride *= 2

    @property
    def points(self) -> tuple[MetricPoint, ...]:
        return (*self._points, *self._pending[-1:])


def _merge_points(points: list[MetricPoint]) -> MetricPoint:
    """A point with the means of loss and throughput; everything else is the last point's."""
    last = points[-1]
    losses = [point.loss for point in points if point.loss is not None]
    loss = sum(losses) / len(losses) if losses else None
    speed = sum(point.rows_per_second for point in points) / len(points)
    return MetricPoint(last.at, last.step, loss, speed, last.world)


class Throughput:
    """Rows and steps per second over a sliding window, from metrics with `epoch`, `step`, `steps` and `rows`."""

    def __init__(self, window: float = THROUGHPUT_WINDOW) -> None:
        self._window = window  # seconds
        self._samples: deque[tuple[float, int]] = deque()  # time, applied steps
        self._rows_per_step = 0.0
        self._steps_left: int | None = None

    def add(self, at: float, metrics: Mapping[str, Any]) -> None:
        done = count_steps(metrics)
        if self._samples and done < self._samples[-1][1]:
            self._samples.clear()  # the run went back to a checkpoint
        self._samples.append((at, done))
        while len(self._samples) > 2 and at - self._samples[0][0] > self._window:
            self._samples.popleft()
        self._rows_per_step = float(metrics.get("rows", 0) or 0)
        epochs, steps = metrics.get("epochs"), metrics.get("steps")
        self._steps_left = int(epochs) * int(steps) - done if epochs and steps else None

    def is_stale(self, at: float) -> bool:
        """Whether no report has come for longer than the window and than three times the usual interval."""
        if not self._samples:
            return True
        interval = (self._samples[-1][0] - self._samples[0][0]) / max(1, len(self._samples) - 1)
        return at - self._samples[-1][0] > max(self._window, 3 * interval)

    @property
    def steps_per_second(self) -> float:
        if len(self._samples) < 2 or self._samples[-1][0] <= self._samples[0][0]:
            return 0.0
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first)

    @property
    def rows_per_second(self) -> float:
        return self.steps_per_second * self._rows_per_step

    @property
    def seconds_left(self) -> float | None:
        """None while unknown."""
        speed = self.steps_per_second
        return None if self._steps_left is None or speed <= 0 else self._steps_left / speed


def count_steps(metrics: Mapping[str, Any]) -> int:
    """Applied steps of the whole run, as far as the metrics tell."""
    return int(metrics.get("epoch", 0)) * int(metrics.get("steps", 0)) + int(metrics.get("step", 0))


class WorldChangeKind(Enum):
    """Why a world was formed."""

    START = "start"
    LOSS = "loss"  # a member was lost, others survived
    PLANNED = "planned"  # members joined or left at a step boundary
    RESTART = "restart"  # no member of the previous world survived


UNPLANNED = (WorldChangeKind.LOSS, WorldChangeKind.RESTART)


@dataclass(frozen=True)
class WorldChange:
    """A new world: what happened, why, and what it cost."""

    generation: int  # of the new world
    at: float  # when the world was published, in seconds since the launch
    kind: WorldChangeKind  # start, loss or planned
    before: int  # size of the previous world
    size: int  # of the new world
    joined: int  # members that were not in the previous world
    left: int  # members of the previous world that are not in this one
    reason: str  # in words
    seconds: float | None = None  # downtime until every member had built this world; None: it was never built
    steps_lost: int | None = 0  # applied steps that have to be repeated; None: the program counts no steps
    bulk_seconds: float | None = None  # until NCCL summed its gradients; None: it never did

    def __str__(self) -> str:
        """One line: what happened and what it cost."""
        moves = [(self.joined, "joined"), (self.left, "left as planned")]
        text = {
            WorldChangeKind.START: "started",
            WorldChangeKind.LOSS: f"{self.left} of {self.before} lost, recovered",
            WorldChangeKind.RESTART: f"all {self.before} lost, restarted",
            WorldChangeKind.PLANNED: ", ".join(f"{n} {verb}" for n, verb in moves if n) or "re-formed",
        }[self.kind]
        if self.seconds is not None:
            text += f" in {self.seconds:.2f} s"
        if self.kind in UNPLANNED and self.steps_lost is not None:
            text += f", {self.steps_lost or 'no'} committed step{'' if self.steps_lost == 1 else 's'} lost"
        if self.bulk_seconds is not None:
            text += f", sums by NCCL after {self.bulk_seconds:.1f} s"
        return f"world of {self.size}: {text} ({self.reason})"


@dataclass(frozen=True)
class EpochRows:
    """Row counts of one epoch; `ledger=True` records the ids of the rows as well."""

    epoch: int  # from 0
    seen: int  # rows that entered an applied step
    missing: int  # how many fewer than planned
    duplicated: int  # how many more than planned
    steps: int = 0  # that were applied; 0: unknown
    figures: Mapping[str, float] = field(default_factory=dict)  # losses, metrics and learning rate at its end


# Numbers that a status has as they are.
DESCRIBED = ("goodput", "steps_lost", "checkpoints", "checkpoint_seconds", "reserved_hours", "useful_hours")
GOODPUT_SECONDS = 60.0  # a report of a shorter job prints no goodput
MAX_SHOWN_CHANGES = 200  # world changes that a status page has
FRAME_HEIGHT = 720  # of a notebook's output, in pixels


@dataclass(frozen=True, repr=False)
class JobReport:
    """Where the time of a job went, what losses cost, and how many rows were trained."""

    seconds: float = 0.0  # duration of the whole job
    # Seconds per phase of PHASES. start: until the first world was complete; training: while a whole world trained;
    # recovery and planned: while training was interrupted by a loss or a planned change; closing: after the first
    # worker had finished.
    phases: Mapping[str, float] = field(default_factory=dict)
    world_changes: tuple[WorldChange, ...] = ()  # oldest first; only the newest of very many
    curve: tuple[MetricPoint, ...] = ()  # thinned to MAX_POINTS
    checkpoints: int = 0  # published ones
    checkpoint_seconds: float = 0.0  # for how long checkpoints (copying the state) held up training
    reserved_hours: float = 0.0  # of all slots
    useful_hours: float = 0.0  # of all workers while their world trained
    epochs: tuple[EpochRows, ...] = ()  # as in a fit's history; (): a function or script ran

    @property
    def goodput(self) -> float:
        """Share of the job's time, from launch to end, in which a whole world trained and no checkpoint held it up."""
        useful = self.phases.get("training", 0.0) - self.checkpoint_seconds
        return max(0.0, useful) / self.seconds if self.seconds > 0 else 0.0

    @property
    def recoveries(self) -> tuple[WorldChange, ...]:
        """World changes that followed a loss."""
        return tuple(change for change in self.world_changes if change.kind in UNPLANNED)

    @property
    def steps_lost(self) -> int:
        return sum(change.steps_lost or 0 for change in self.world_changes)

    def recovery_seconds(self, percent: float) -> float | None:
        """The percentile (nearest rank) of the recoveries' durations; None if there was none."""
        known = sorted(change.seconds for change in self.recoveries if change.seconds is not None)
        return known[max(0, math.ceil(percent / 100 * len(known)) - 1)] if known else None

    def with_rows(self, history: Iterable[Mapping[str, Any]], data_rows: int) -> JobReport:
        """This report with the rows of each epoch. history: entries with `epoch`, `rows` (as counted by the state that
        belongs to the final weights), `planned` (default `data_rows`), the rows of the steps taken, `steps`,
        metrics."""
        epochs = []
        for entry in history:
            seen, planned = int(entry["rows"]), int(entry.get("planned", data_rows))
            wrong = max(0, planned - seen), max(0, seen - planned)
            figures = {name: n for name, n in entry.items() if isinstance(n, float) and name != "seconds"}
            epochs.append(EpochRows(int(entry["epoch"]), seen, *wrong, int(entry.get("steps", 0)), figures))
        return dataclasses.replace(self, epochs=tuple(epochs))

    def _find_epoch(self, at: float) -> float | None:
        """Where training was at that time: 1.5 in the middle of the second epoch. None: nobody knows."""
        steps = max((rows.steps for rows in self.epochs), default=0)
        return max((p.step for p in self.curve if p.at <= at), default=0) / steps if steps else None

    def plot(self) -> Figure:
        """Loss, throughput and world size over the seconds since the launch, and the losses of training and validation
        by epoch; losses of workers are marked. Opens no window; `plot().savefig("job.png")` writes a file.

        Raises:
            InvalidInput: matplotlib is not installed.
        """
        sizes = [(change.at, change.size) for change in self.world_changes]
        sizes += [(max(self.seconds, at), size) for at, size in sizes[-1:]]
        losses = [(point.at, point.loss) for point in self.curve if point.loss is not None]
        rates = [(point.at, point.rows_per_second) for point in self.curve]
        colors = "tab:blue", "tab:green", "tab:orange"
        curves: dict[str, Sequence[tuple[float, float]]] = {"loss": losses, "rows/s": rates, "workers": sizes}
        with_epochs = any("loss" in rows.figures for rows in self.epochs)
        matplotlib = require_package("matplotlib.figure", "plot()", "matplotlib")
        figure: Figure = matplotlib.Figure(figsize=(8, 8 if with_epochs else 6), layout="constrained")
        over_time = figure.subplots(3 + with_epochs, 1)
        if with_epochs:
            *over_time, by_epoch = over_time
            self._plot_epochs(by_epoch)
        for axes, (label, points), color in zip(over_time, curves.items(), colors, strict=True):
            ats, values = [at for at, _ in points], [value for _, value in points]
            style = "steps-post" if label == "workers" else "default"
            axes.plot(ats, values, color=color, drawstyle=style)
            axes.set_ylabel(label)
            axes.sharex(over_time[-1])
            axes.tick_params(labelbottom=axes is over_time[-1])
            for change in self.recoveries:
                axes.axvline(change.at, color="tab:red", alpha=0.4, linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds since the launch")
        return figure

    def _plot_epochs(self, axes: Axes) -> None:
        for name, label in (("loss", "training"), ("val_loss", "validation")):
            points = [(rows.epoch + 1, rows.figures[name]) for rows in self.epochs if name in rows.figures]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        for change in self.recoveries:
            if (epoch := self._find_epoch(change.at)) is not None:
                axes.axvline(epoch, color="tab:red", alpha=0.4, linewidth=1)
        axes.set_ylabel("loss")
        axes.set_xlabel("epochs")
        axes.locator_params(axis="x", integer=True)
        axes.legend()

    def to_html(self, name: str = "spark_elastic") -> str:
        """The status page of the job as it ended, in one document that needs no server.

        Args:
            name: the page's title.
        """
        last = self.curve[-1] if self.curve else None
        size = self.world_changes[-1].size if self.world_changes else 0
        metrics: dict[str, float | None] = {} if last is None else {"loss": last.loss, "step": last.step}
        if self.epochs:
            metrics |= {"epoch": self.epochs[-1].epoch, **self.epochs[-1].figures}
            metrics["rows missing"] = sum(rows.missing for rows in self.epochs)
            metrics["rows twice"] = sum(rows.duplicated for rows in self.epochs)
        status: dict[str, Any] = {"name": name, "stage": "finished", "size": size, "limits": [size] * 3}
        status |= {"metrics": metrics, "seconds_left": None, "slots": [], "lost_slots": [], "more_slots": 0}
        status |= {"rows_per_second": None if last is None else last.rows_per_second, "stalled": []}
        return save_page({**status, "events": self.list_events(), **self.describe()})

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame of its own."""
        page = html.escape(self.to_html("the job"))
        look = f'width="100%" height="{FRAME_HEIGHT}" style="border: 0"'
        return f'<iframe sandbox="allow-scripts" srcdoc="{page}" {look}></iframe>'

    def describe(self) -> dict[str, Any]:
        """What the data of a status page hold of a report. Times are seconds since the launch."""
        find = self._find_epoch
        return {
            "seconds": round(self.seconds, 3),
            "report": {
                **{name: getattr(self, name) for name in DESCRIBED},
                "phases": dict(self.phases),
                "recoveries": len(self.recoveries),
                "recovery_p50": self.recovery_seconds(50),
                "recovery_p99": self.recovery_seconds(99),
                "recovery_total": sum(change.seconds or 0.0 for change in self.recoveries),
            },
            "world_changes": [
                {"at": c.at, "epoch": find(c.at), "kind": c.kind.value, "size": c.size, "seconds": c.seconds}
                for c in self.world_changes[-MAX_SHOWN_CHANGES:]
            ],
            "epochs": [{"epoch": rows.epoch + 1, **rows.figures} for rows in self.epochs[-MAX_POINTS:]],
            "curve": {
                "at": [round(point.at, 2) for point in self.curve],
                "loss": [point.loss for point in self.curve],
                "rows": [round(point.rows_per_second, 2) for point in self.curve],
            },
        }

    def list_events(self) -> list[dict[str, Any]]:
        """The changes of the world as events of a status page."""
        return [
            {"at": change.at, "kind": change.kind.value, "text": str(change)[:MAX_TEXT], "times": 1}
            for change in self.world_changes[-MAX_SHOWN_CHANGES:]
        ]

    def to_json(self) -> str:
        return json.dumps(codec.to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> JobReport:
        return codec.read(cls, json.loads(text))

    def __repr__(self) -> str:
        recoveries = f"{len(self.recoveries)} recover{'y' if len(self.recoveries) == 1 else 'ies'}"
        return f"<JobReport of {self.seconds:.1f} s, {recoveries}; print() shows more>"

    def __str__(self) -> str:
        """A human-readable summary of a few lines."""
        shares = ", ".join(f"{name} {self.phases.get(name, 0.0):.1f} s" for name in PHASES)
        # Of a short job the start is the greatest part, which says nothing about a longer one.
        goodput = f"goodput {self.goodput:.1%} of " if self.seconds >= GOODPUT_SECONDS else ""
        lines = [f"{goodput}{self.seconds:.1f} s: {shares}"]
        if self.recoveries:
            p50, p99 = self.recovery_seconds(50), self.recovery_seconds(99)
            took = "" if p50 is None or p99 is None else f", p50 {p50:.2f} s, p99 {p99:.2f} s"
            lost = [change.steps_lost for change in self.recoveries if change.steps_lost is not None]
            steps = f"; steps lost: {sum(lost)}" if lost else ""
            lines.append(f"recoveries: {len(self.recoveries)}{took}{steps}")
        else:
            lines.append("no worker was lost")
        held = f"which held up training for {self.checkpoint_seconds:.2f} s"
        lines.append(f"checkpoints: {self.checkpoints}, {held}")
        lines.append(f"worker-hours: {self.reserved_hours:.3f} reserved, {self.useful_hours:.3f} useful")
        lines += [
            f"epoch {rows.epoch + 1}: {rows.seen} rows, {rows.missing} missing, {rows.duplicated} duplicated"
            for rows in self.epochs
        ]
        return "\n".join(lines)


def read_page() -> bytes:
    return files("spark_elastic.monitoring").joinpath("status_page.html").read_bytes()


def save_page(status: dict[str, Any]) -> str:
    """The page of a job that is over, with the last status in it."""
    data = encode_json({**status, "saved": True}).decode().replace("<", "\\u003c")
    holder = f'<script type="application/json" id="saved">{data}</script>\n'
    return read_page().decode().replace(_SCRIPT, holder + _SCRIPT, 1)


def encode_json(status: dict[str, Any]) -> bytes:
    """As JSON. Infinities and NaN become null, since browsers refuse JSON that contains them."""
    try:
        return json.dumps(status, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_replace_non_finite(status), separators=(",", ":")).encode()


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build_content_security_policy(html: bytes) -> str:
    """Allow only the page's own script and style, by their hashes, and data from the same origin."""
    hashes = {}
    for tag in ("script", "style"):
        element = re.search(f"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)
        assert element is not None  # of our own page
        hashes[tag] = base64.b64encode(hashlib.sha256(element[1]).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
