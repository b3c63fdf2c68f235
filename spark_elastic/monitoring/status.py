"""How a job stands, for people and machines: a status as a plain value of bounded size, its page and its metrics.

The server's thread builds each page when a browser asks for it, from the job's history and the newest state of the
driver machine, which is immutable.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from spark_elastic.monitoring.console import POSITION_METRICS
from spark_elastic.monitoring.job_history import HistoryEntry, JobHistory
from spark_elastic.monitoring.report import (
    MAX_TEXT,
    JobReport,
    build_content_security_policy,
    encode_json,
    read_page,
)
from spark_elastic.protocol.driver.state import DriverState, SlotRecord
from spark_elastic.rendezvous.status_app import Page

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


def build_status_pages(history: JobHistory, name: str) -> dict[str, Page]:
    """The pages of a job by their path, relative to the status page: HTML without external assets, JSON, metrics."""
    html = read_page()
    return {
        "": Page("text/html; charset=utf-8", partial(bytes, html), build_content_security_policy(html)),
        "data": Page("application/json", lambda: encode_json(build_status(history, name))),
        "metrics": Page(PROMETHEUS_TYPE, lambda: format_prometheus(build_status(history, name))),
    }


# ---- the status


def build_status(history: JobHistory, name: str) -> dict[str, Any]:
    """A value that JSON can hold. Times are seconds since the launch."""
    now, state, report, metrics, throughput, entries, lost_slots = history.view()
    stale = throughput.is_stale(report.seconds)
    return {
        "name": name,
        **report.describe(),
        **(STARTING if state is None else _describe_state(state, now)),
        "lost_slots": [{**dataclasses.asdict(lost), "reason": lost.reason[:MAX_TEXT]} for lost in lost_slots],
        "metrics": {
            name: n for name, n in metrics.items() if type(n) is not bool and isinstance(n, int | float)
        },
        "rows_per_second": 0.0 if stale else round(throughput.rows_per_second, 2),
        "seconds_left": None if stale else throughput.seconds_left,
        "events": _list_events(report, entries),
    }


def _list_events(report: JobReport, entries: Sequence[HistoryEntry]) -> list[dict[str, Any]]:
    """Changes of the world and the driver's other decisions, oldest first."""
    last_world = report.world_changes[-1].at if report.world_changes else 0.0
    decisions = [
        {**dataclasses.asdict(entry), "text": EVENT_WORDS[entry.kind] + entry.text[:MAX_TEXT]}
        for entry in entries
        # The world after a broken one names the loss and its cost.
        if entry.kind in EVENT_WORDS and (entry.kind != "abort world" or entry.at > last_world)
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


# ---- metrics in Prometheus' text format


def format_prometheus(status: dict[str, Any]) -> bytes:
    job = _escape_label(status["name"])
    lines: list[str] = []
    for metric, kind, description, samples in _list_metrics(status):
        name = f"{PROMETHEUS_PREFIX}{metric}"
        lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
        lines += [
            f'{name}{{job_name="{job}"{label}}} {_format_number(sample)}'
            for label, sample in samples
            if sample is not None
        ]
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


def _format_number(value: float) -> str:
    return repr(float(value)).replace("inf", "Inf").replace("nan", "NaN")


def _escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
