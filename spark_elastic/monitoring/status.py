"""How a job stands, as one plain value of bounded size: what the status page and the metrics show. Pure.

Made when somebody asks, from the machine's newest state, which nobody changes, and the chronicle.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.resources import files
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.monitoring.job_history import JobHistory
from spark_elastic.monitoring.progress import PLACE
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.driver.state import DriverState, SlotRecord
from spark_elastic.rendezvous.status_app import Page

MOST_SLOTS = 400
MOST_CHANGES = 200
MOST_STUCK = 16
MOST_TEXT = 4000  # characters of a sentence or a stack


def snapshot(chronicle: JobHistory, name: str, now: float) -> dict[str, Any]:
    """JSON-able. now: of the clock that the events carry; times in the value are seconds since the launch."""
    state, numbers, speed, told = chronicle.look()
    report = chronicle.report(now)
    moves = not speed.is_stalled(report.seconds)
    return {
        "name": name,
        "seconds": round(report.seconds, 3),
        **_standing(state),
        "slots": _slots(state, now),
        "more_slots": max(0, len(state.slots) - MOST_SLOTS) if state is not None else 0,
        "stuck": _stuck(state),
        "numbers": _plain(numbers),
        "rows_per_second": round(speed.rows_per_second, 2) if moves else 0.0,
        "seconds_left": speed.seconds_left if moves else None,
        "report": _figures(report),
        "changes": [
            {
                "at": change.at, "kind": change.kind.value, "size": change.size, "seconds": change.seconds,
                "text": str(change)[:MOST_TEXT],
            }
            for change in report.world_changes[-MOST_CHANGES:]
        ],
        "curve": {
            "at": [round(point.at, 2) for point in report.curve],
            "loss": [point.loss for point in report.curve],
            "rows": [round(point.rows_per_second, 2) for point in report.curve],
        },
        "told": [
            {"at": one.at, "kind": one.kind, "text": one.text[:MOST_TEXT], "times": one.times} for one in told
        ],
    }  # fmt: skip


def text(value: dict[str, Any]) -> bytes:
    """As JSON; what JSON has no number for becomes null, since a browser would refuse the whole."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":")).encode()


def _standing(state: DriverState | None) -> dict[str, Any]:
    if state is None:
        return {"stage": "starting", "generation": 0, "attempt": 0, "size": 0, "limits": [0, 0, 0]}
    limits = state.limits
    return {
        "stage": state.stage.value,
        "generation": state.generation,
        "attempt": state.attempt,
        "size": 0 if state.world is None else state.world.size,
        "limits": [limits.min_workers, limits.num_workers, limits.max_workers],
    }


def _slots(state: DriverState | None, now: float) -> list[dict[str, Any]]:
    """By rank, then those without one."""
    if state is None:
        return []
    shown = [_slot(state, slot, now) for slot in _first(state.slots.values(), 4 * MOST_SLOTS)]
    shown.sort(key=lambda one: (one["rank"] is None, one["rank"] or 0, one["host"], one["slot"]))
    return shown[:MOST_SLOTS]


def _slot(state: DriverState, slot: SlotRecord, now: float) -> dict[str, Any]:
    worker = None if slot.worker is None else state.workers.get(slot.worker)
    cools = state.blacklist.slot_until(slot.slot, slot.host, now) if state.blacklist else None
    return {
        "slot": slot.slot,
        "host": slot.host,
        "node": slot.node,
        "worker": slot.worker or "",
        "rank": None if worker is None else worker.rank,
        "status": "no worker" if worker is None else worker.status.value,
        "heard": round(max(0.0, now - slot.last_seen), 1),
        "draining": "" if worker is None else worker.draining,
        "cools": None if cools is None else _plain_number(cools - now),
        "stuck": worker is not None and worker.worker in state.current.stalled,
    }


def _stuck(state: DriverState | None) -> list[dict[str, Any]]:
    if state is None:
        return []
    found = []
    for name, why in _first(state.current.stalled.items(), MOST_STUCK):
        worker = state.workers.get(name)
        rank = None if worker is None else worker.rank
        found.append({"worker": name, "rank": rank, "text": why[:MOST_TEXT]})
    return found


def _figures(report: JobReport) -> dict[str, Any]:
    return {
        "goodput": report.goodput,
        "phases": dict(report.phases),
        "recoveries": len(report.recoveries),
        "recovery_p50": report.recovery_seconds(50),
        "recovery_p99": report.recovery_seconds(99),
        "recovery_total": sum(change.seconds or 0.0 for change in report.recoveries),
        "steps_lost": report.steps_lost,
        "checkpoints": report.checkpoints,
        "checkpoint_seconds": report.checkpoint_seconds,
        "reserved_hours": report.reserved_hours,
        "useful_hours": report.useful_hours,
    }


def _plain(numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers among what a program reports."""
    return {key: value for key, value in numbers.items() if isinstance(value, int | float)}


def _plain_number(value: float) -> float | None:
    return None if value in (float("inf"), float("-inf")) else round(value, 1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value


def _first(items: Iterable[Any], most: int) -> list[Any]:
    return [item for _, item in zip(range(most), items, strict=False)]


# A snapshot in Prometheus' text format. Pure.


KIND = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "spark_elastic_"


def exposition(value: dict[str, Any]) -> bytes:
    """value: of `snapshot`."""
    job = _quoted(value["name"])
    lines: list[str] = []
    for name, kind, said, samples in _metrics(value):
        lines += [f"# HELP {PREFIX}{name} {said}", f"# TYPE {PREFIX}{name} {kind}"]
        lines += [
            f'{PREFIX}{name}{{job_name="{job}"{label}}} {_number(sample)}'
            for label, sample in samples
            if sample is not None
        ]
    return ("\n".join(lines) + "\n").encode()


def _metrics(value: dict[str, Any]) -> Iterator[tuple[str, str, str, list[tuple[str, Any]]]]:
    report, numbers = value["report"], value["numbers"]
    statuses = Counter(slot["status"] for slot in value["slots"])
    yield "world_size", "gauge", "Workers of the newest world.", [("", value["size"])]
    yield "generation", "counter", "Worlds so far.", [("", value["generation"])]
    yield (
        "slots",
        "gauge",
        "Slots by the state of their worker.",
        [(f',status="{_quoted(status)}"', count) for status, count in sorted(statuses.items())],
    )
    yield "stalled_workers", "gauge", "Members that keep others waiting.", [("", len(value["stuck"]))]
    yield (
        "rows_per_second",
        "gauge",
        "Rows trained a second by the whole world.",
        [("", value["rows_per_second"])],
    )
    for name in ("epoch", "step", "loss"):
        yield name, "gauge", f"Newest {name} that rank 0 reported.", [("", numbers.get(name))]
    others = sorted(set(numbers) - set(PLACE))
    yield (
        "reported",
        "gauge",
        "What else rank 0 reported: metrics, losses of validation, learning rate.",
        [(f',name="{_quoted(name)}"', numbers[name]) for name in others],
    )
    yield (
        "phase_seconds_total",
        "counter",
        "Where the job's time went.",
        [(f',phase="{_quoted(phase)}"', seconds) for phase, seconds in report["phases"].items()],
    )
    yield (
        "goodput_ratio",
        "gauge",
        "Share of the job's time in which a whole world trained, less what checkpoints took.",
        [("", report["goodput"])],
    )
    yield "recoveries_total", "counter", "Worlds that followed a loss.", [("", report["recoveries"])]
    yield (
        "recovery_seconds_total",
        "counter",
        "Time in which nobody trained because of losses.",
        [("", report["recovery_total"])],
    )
    yield (
        "steps_lost_total",
        "counter",
        "Applied steps that were taken once more.",
        [("", report["steps_lost"])],
    )
    yield "checkpoints_total", "counter", "Checkpoints that were published.", [("", report["checkpoints"])]


def _number(value: float) -> str:
    return repr(float(value)).replace("inf", "Inf").replace("nan", "NaN")


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# The pages of a running job: one HTML page without any external asset, its data as JSON, and the metrics.
#
# Every page is made when it is asked for, in the server's thread.


def pages(chronicle: JobHistory, name: str, clock: Clock) -> dict[str, Page]:
    """The pages by their path, relative to the status page."""
    html = files("spark_elastic.monitoring").joinpath("status_page.html").read_bytes()

    def seen() -> dict[str, object]:
        return snapshot(chronicle, name, clock.now())

    return {
        "": Page("text/html; charset=utf-8", partial(bytes, html), policy(html)),
        "data": Page("application/json", lambda: text(seen())),
        "metrics": Page(KIND, lambda: exposition(seen())),
    }


def policy(html: bytes) -> str:
    """Nothing runs but this page's own script and style, named by their hashes; data comes from the same place."""
    hashes = {tag: _hash(html, tag) for tag in (b"script", b"style")}
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[b'script']}'; style-src 'sha256-{hashes[b'style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _hash(html: bytes, tag: bytes) -> str:
    found = re.search(b"<" + tag + b">(.*?)</" + tag + b">", html, re.DOTALL)
    assert found is not None  # of our own page
    return base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
