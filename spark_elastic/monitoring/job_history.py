"""The history of a running job in bounded memory: its worlds, time per phase, metrics, and the decisions made.

Report, status page and progress messages are views of it. The driver's thread calls `on_transition`, the server's
`on_progress`, and builds pages when a browser asks; any thread may read. One lock guards everything."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.monitoring.console import POSITION_METRICS
from spark_elastic.monitoring.listener import Commands, JobListener, Metrics
from spark_elastic.monitoring.report import (
    MAX_TEXT,
    PHASES,
    JobReport,
    MetricPoint,
    MetricSeries,
    Throughput,
    WorldChange,
    WorldChangeKind,
    build_content_security_policy,
    count_steps,
    encode_json,
    read_page,
)
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol.driver.state import DriverState, JobStage, SlotRecord
from spark_elastic.protocol.types import Phase, Position, World
from spark_elastic.rendezvous.status_app import Page

MAX_WORLD_CHANGES = 5000
MAX_ENTRIES = 400
MAX_LOST_SLOTS = 100
LOST_SECONDS = 600.0  # for so long the status page shows a slot that is gone
# There may be thousands of them: at the start, at the end, or during a long training.
MERGED_ENTRIES = ("launch slot", "release slot", "stop worker", "publish checkpoint")
MAX_SLOTS = 400
MAX_STALLED = 16
PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROMETHEUS_PREFIX = "spark_elastic_"
# What a status has before the driver's first event.
STARTING = {
    "stage": "starting", "generation": 0, "attempt": 0, "size": 0, "limits": [0, 0, 0], "slots": [], "more_slots": 0,
    "slot_counts": {}, "stalled": [], "stalled_count": 0,
}  # fmt: skip
# What the page calls the driver's decisions. It leaves out those that a change of the world shows anyway.
EVENT_WORDS = {
    "launch slot": "slot requested: ",
    "release slot": "slot released: ",
    "stop worker": "worker stopped: ",
    "publish checkpoint": "checkpoint: ",
    "abort world": "world broken: ",
    "end": "the job ended: ",
    "notify user": "",
    "stall": "",
}


class JobHistory(JobListener):
    """Begins when it is created. on_complete: called on the driver's thread for each world that all members have
    built."""

    def __init__(self, clock: Clock, on_complete: Callable[[WorldChange], None] = lambda new: None) -> None:
        self._clock = clock
        self._started = clock.now()
        self._on_complete = on_complete
        self._lock = threading.Lock()
        # What the driver decided.
        self._state: DriverState | None = None  # the newest
        self._worlds: deque[WorldChange] = deque(maxlen=MAX_WORLD_CHANGES)
        self._phase, self._phase_since = "start", 0.0
        self._phases = dict.fromkeys(PHASES, 0.0)  # seconds, without the current phase
        self._useful = self._reserved = 0.0  # worker-seconds, those reserved until `_last_event`
        self._last_event = 0.0
        self._ended_at: float | None = None
        self._checkpoints = 0
        self._entries: deque[dict[str, Any]] = deque(maxlen=MAX_ENTRIES)
        self._lost: deque[dict[str, Any]] = deque(maxlen=MAX_LOST_SLOTS)
        # What rank 0 reported.
        self._metrics: Metrics = {}  # the newest
        self._series, self._throughput = MetricSeries(), Throughput()
        self._steps_done = 0  # without those that the present world repeats
        self._earlier_checkpoint_seconds = 0.0  # of the processes that were rank 0 before

    def on_transition(self, event: on.DriverEvent, commands: Commands, state: DriverState | None) -> None:
        at, completed = event.now - self._started, None
        with self._lock:
            if state is not None and self._ended_at is None:
                completed = self._follow(at, commands, state)
            for command in commands:
                words = re.findall("[A-Z][a-z]*", type(command).__name__)
                self._add_entry(at, " ".join(words).lower(), command.reason)
            if isinstance(event, on.WorkerStalled):
                self._add_entry(at, "stall", event.text)
        if completed is not None:
            self._on_complete(completed)

    def on_progress(self, metrics: Metrics) -> None:
        at = self._clock.now() - self._started
        loss = float(metrics["loss"]) if metrics.get("loss") is not None else None
        with self._lock:
            before = _get_checkpoint_seconds(self._metrics)
            if _get_checkpoint_seconds(metrics) < before:  # another process is rank 0 now
                self._earlier_checkpoint_seconds += before
            self._add_bulk_seconds(metrics)
            self._metrics = dict(metrics)
            self._steps_done = count_steps(metrics)
            self._throughput.add(at, metrics)
            rate, world = self._throughput.rows_per_second, int(metrics.get("world", 0))
            self._series.add(MetricPoint(at, self._steps_done, loss, rate, world))

    def build_report(self) -> JobReport:
        """Of the job so far."""
        with self._lock:
            return self._build_report(self._clock.now() - self._started)

    def build_status(self, name: str) -> dict[str, Any]:
        """What the status page shows of a job of that name, as JSON can hold it. Times are seconds since the launch."""
        now = self._clock.now()
        at = now - self._started
        with self._lock:
            report, state, metrics, entries = (
                self._build_report(at),
                self._state,
                self._metrics,
                list(self._entries),
            )
            lost = [slot for slot in reversed(self._lost) if at - slot["at"] <= LOST_SECONDS]  # newest first
        stale = self._throughput.is_stale(at)
        return {
            "name": name,
            **report.describe(),
            **(STARTING if state is None else _describe_state(state, now)),
            "lost_slots": lost,
            "metrics": {name: n for name, n in metrics.items() if type(n) in (int, float)},
            "rows_per_second": 0.0 if stale else round(self._throughput.rows_per_second, 2),
            "seconds_left": None if stale else self._throughput.seconds_left,
            "events": _list_events(report, entries),
        }

    # ---- under the lock

    def _build_report(self, at: float) -> JobReport:
        phases, useful = self._sum_up(at if self._ended_at is None else self._ended_at)
        return JobReport(
            seconds=at,
            phases=phases,
            world_changes=tuple(self._worlds),
            curve=self._series.points,
            checkpoints=self._checkpoints,
            checkpoint_seconds=self._earlier_checkpoint_seconds + _get_checkpoint_seconds(self._metrics),
            reserved_hours=self._reserved / 3600,
            useful_hours=useful / 3600,
        )

    def _follow(self, at: float, commands: Commands, state: DriverState) -> WorldChange | None:
        """Take over what a transition changed. Returns the world that is complete with it, if any."""
        before, self._state = self._state, state
        if before is not None:
            self._reserved += len(before.slots) * max(0.0, at - self._last_event)
            self._checkpoints += before.checkpoints[:1] != state.checkpoints[:1]
            if len(state.slots) < len(before.slots):
                self._add_lost_slots(at, before, state)
        self._last_event = max(at, self._last_event)
        completed = self._enter_phase(at, self._find_phase(commands, state))
        for command in commands:
            if isinstance(command, do.PublishWorld):
                self._add_world(at, command.world, None if before is None else before.world)
        if state.stage is JobStage.ENDED:
            self._ended_at = at
        return completed

    def _find_phase(self, commands: Commands, state: DriverState) -> str:
        """A pause lasts until every member has built the next world."""
        if state.stage is JobStage.ENDED or state.timers.done_since is not None:
            return "closing"
        if state.current.break_reason or any(isinstance(command, do.AbortWorld) for command in commands):
            return "recovery"
        if state.current.results:
            return "closing"
        leaves = state.timers.leaving_since is not None
        if state.stage is JobStage.RUNNING and not state.workers.unformed and not leaves:
            return "training"
        return "planned" if self._phase == "training" else self._phase

    def _enter_phase(self, at: float, phase: str) -> WorldChange | None:
        """Returns the newest world if its training begins."""
        if phase == self._phase:
            return None
        if (self._phase, phase) == ("planned", "recovery"):  # a loss during a planned change
            self._phase = phase
            return None
        passed = max(0.0, at - self._phase_since)
        self._phases, self._useful = self._sum_up(at)
        self._phase, self._phase_since = phase, at
        if phase != "training":
            return None
        self._worlds[-1] = dataclasses.replace(self._worlds[-1], seconds=passed)
        return self._worlds[-1]

    def _sum_up(self, at: float) -> tuple[dict[str, float], float]:
        """Seconds of each phase, and useful worker-seconds, up to a time."""
        passed = max(0.0, at - self._phase_since)
        size = self._worlds[-1].size if self._phase == "training" else 0
        phases = {**self._phases, self._phase: self._phases[self._phase] + passed}
        return phases, self._useful + size * passed

    def _add_world(self, at: float, world: World, previous: World | None) -> None:
        before, now = ({m.worker for m in each.members} if each else set() for each in (previous, world))
        if previous is None:
            kind = WorldChangeKind.START
        elif not before & now:
            kind = WorldChangeKind.RESTART
        else:
            kind = WorldChangeKind.LOSS if self._phase == "recovery" else WorldChangeKind.PLANNED
        lost = 0 if previous is None else self._count_steps_lost(world)
        sizes = len(before), len(now), len(now - before), len(before - now)
        number = world.fence.generation
        self._worlds.append(WorldChange(number, at, kind, *sizes, world.reason, steps_lost=lost))

    def _count_steps_lost(self, world: World) -> int | None:
        """Reported steps that the new world has to repeat; None if the program reports no steps. Call it once for each
        world: if the next one comes before a new report, it does not lose the same steps again."""
        if "step" not in self._metrics:
            return None
        resumed_from = _count_steps_before(world.start_position, int(self._metrics.get("steps", 0)))
        lost = max(0, self._steps_done - resumed_from)
        self._steps_done -= lost
        return lost

    def _add_bulk_seconds(self, metrics: Metrics) -> None:
        """Metrics may arrive when the next world has begun."""
        if metrics.get("bulk_seconds") is None:
            return
        for number, change in enumerate(self._worlds):
            if change.generation == metrics.get("bulk_generation"):
                seconds = float(metrics["bulk_seconds"])
                self._worlds[number] = dataclasses.replace(change, bulk_seconds=seconds)

    def _add_lost_slots(self, at: float, before: DriverState, state: DriverState) -> None:
        for name, slot in before.slots.items():
            if name not in state.slots:
                reason = state.slots.departed.get(name, "")[:MAX_TEXT]
                seen = _describe_slot(before, slot, at)
                own = {key: seen[key] for key in ("host", "node", "worker", "rank")}
                self._lost.append({"at": at, **own, "reason": reason})

    def _add_entry(self, at: float, kind: str, text: str) -> None:
        times = 1  # successive entries of this kind that are merged; the text is that of the last one
        if kind in MERGED_ENTRIES and self._entries and self._entries[-1]["kind"] == kind:
            times += self._entries.pop()["times"]
        self._entries.append({"at": at, "kind": kind, "text": text[:MAX_TEXT], "times": times})


def _get_checkpoint_seconds(metrics: Metrics) -> float:
    """For how long checkpoints held up the process that reported this."""
    return float(metrics.get("checkpoint_seconds", 0.0))


def _count_steps_before(position: Position | None, steps: int) -> int:
    """Applied steps before a position, in a run of `steps` per epoch."""
    if position is None:
        return 0
    return position.epoch * steps + (position.step if position.phase is Phase.TRAIN else steps)


def build_status_pages(history: JobHistory, name: str) -> dict[str, Page]:
    """The pages of a job by their path, relative to the status page: HTML without external assets, JSON, metrics."""
    html = read_page()
    return {
        "": Page("text/html; charset=utf-8", partial(bytes, html), build_content_security_policy(html)),
        "data": Page("application/json", lambda: encode_json(history.build_status(name))),
        "metrics": Page(PROMETHEUS_TYPE, lambda: format_prometheus(history.build_status(name))),
    }


def _list_events(report: JobReport, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Changes of the world and the driver's other decisions, oldest first."""
    last_world = report.world_changes[-1].at if report.world_changes else 0.0
    decisions = [
        {**entry, "text": words + entry["text"]}
        for entry in entries
        # The world after a broken one names the loss and its cost.
        if (words := EVENT_WORDS.get(entry["kind"])) is not None
        and (entry["kind"] != "abort world" or entry["at"] > last_world)
    ]
    return sorted([*report.list_events(), *decisions], key=lambda event: event["at"])


def _describe_state(state: DriverState, now: float) -> dict[str, Any]:
    """What the driver machine knows. Slots with a rank come first, by rank."""
    limits, stalled = state.limits, state.current.stalled
    slots = [_describe_slot(state, slot, now) for slot in islice(state.slots.values(), 4 * MAX_SLOTS)]
    slots.sort(key=lambda slot: (slot["rank"] is None, slot["rank"] or 0, slot["host"], slot["slot"]))
    return {
        "stage": state.stage.value,
        "generation": state.generation,
        "attempt": state.attempt,
        "size": 0 if state.world is None else state.world.size,
        "limits": [limits.min_workers, limits.num_workers, limits.max_workers],
        "slots": slots[:MAX_SLOTS],
        "more_slots": max(0, len(state.slots) - MAX_SLOTS),
        # All slots, also those that the page leaves out, by the status of their worker.
        "slot_counts": dict(Counter(_get_status(state, slot) for slot in state.slots.values())),
        "stalled": [
            {"worker": name, "rank": getattr(state.workers.get(name), "rank", None), "text": text[:MAX_TEXT]}
            for name, text in islice(stalled.items(), MAX_STALLED)
        ],
        "stalled_count": len(stalled),
    }


def _get_status(state: DriverState, slot: SlotRecord) -> str:
    worker = None if slot.worker is None else state.workers.get(slot.worker)
    return "no worker" if worker is None else worker.status.value


def _describe_slot(state: DriverState, slot: SlotRecord, now: float) -> dict[str, Any]:
    worker = None if slot.worker is None else state.workers.get(slot.worker)
    cooldown_end = state.blacklist.find_slot_return(slot.slot, slot.host, now) if state.blacklist else None
    return {
        "slot": slot.slot,
        "host": slot.host,
        "node": slot.node,
        "worker": slot.worker or "",
        "rank": None if worker is None else worker.rank,
        "status": _get_status(state, slot),
        "last_seen": round(max(0.0, now - slot.last_seen), 1),  # seconds ago
        "draining": "" if worker is None else worker.draining,  # why
        "cooling_down": cooldown_end is not None,
        "stalled": worker is not None and worker.worker in state.current.stalled,
    }


def format_prometheus(status: dict[str, Any]) -> bytes:
    job = _escape_label(status["name"])
    lines: list[str] = []
    for metric, kind, description, samples in _list_metrics(status):
        name = f"{PROMETHEUS_PREFIX}{metric}"
        lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
        for label, sample in samples:
            if sample is not None:
                number = repr(float(sample)).replace("inf", "Inf").replace("nan", "NaN")
                lines.append(f'{name}{{job_name="{job}"{label}}} {number}')
    return ("\n".join(lines) + "\n").encode()


def _list_metrics(status: dict[str, Any]) -> Iterator[tuple[str, str, str, list[tuple[str, Any]]]]:
    """Yield name, type, description and samples (further labels, value) of each metric."""
    report, metrics = status["report"], status["metrics"]

    def label(name: str, samples: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [(f',{name}="{_escape_label(value)}"', sample) for value, sample in samples.items()]

    others = {name: metrics[name] for name in sorted(metrics.keys() - POSITION_METRICS)}
    goodput = "Share of the job's time in which a whole world trained, less what checkpoints took."
    yield "world_size", "gauge", "Workers of the newest world.", [("", status["size"])]
    yield "generation", "counter", "Worlds so far.", [("", status["generation"])]
    yield "slots", "gauge", "Slots by the state of their worker.", label("status", status["slot_counts"])
    yield "stalled_workers", "gauge", "Members that keep others waiting.", [("", status["stalled_count"])]
    speed = status["rows_per_second"] if "rows" in metrics else None  # a hand-written loop counts none
    yield "rows_per_second", "gauge", "Rows trained by the whole world.", [("", speed)]
    for name in ("epoch", "step", "loss"):
        yield name, "gauge", f"Newest {name} that rank 0 reported.", [("", metrics.get(name))]
    described = "Other metrics that rank 0 reported, such as validation losses."
    yield "reported", "gauge", described, label("name", others)
    yield "phase_seconds_total", "counter", "Where the job's time went.", label("phase", report["phases"])
    yield "goodput_ratio", "gauge", goodput, [("", report["goodput"])]
    yield "recoveries_total", "counter", "Worlds that followed a loss.", [("", report["recoveries"])]
    yield "recovery_seconds_total", "counter", "Time lost to recoveries.", [("", report["recovery_total"])]
    yield "steps_lost_total", "counter", "Applied steps that were repeated.", [("", report["steps_lost"])]
    yield "checkpoints_total", "counter", "Checkpoints that were published.", [("", report["checkpoints"])]


def _escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
