"""How a job stands, as one plain value of bounded size: what the status page and the metrics show. Pure.

Made when somebody asks, from the machine's newest state, which nobody changes, and the chronicle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from spark_elastic.observe.chronicle import Chronicle
from spark_elastic.observe.report import JobReport
from spark_elastic.protocol.driver.driver_state import DriverState
from spark_elastic.protocol.driver.registry import SlotRecord

MOST_SLOTS = 400
MOST_CHANGES = 200
MOST_STUCK = 16
MOST_TEXT = 4000  # characters of a sentence or a stack


def snapshot(chronicle: Chronicle, name: str, now: float) -> dict[str, Any]:
    """JSON-able. now: of the clock that the events carry; times in the value are seconds since the launch."""
    state, numbers, speed, told = chronicle.look()
    report = chronicle.report(now)
    moves = not speed.stands_still(report.seconds)
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
            for change in report.changes[-MOST_CHANGES:]
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
        "heard": round(max(0.0, now - slot.heard), 1),
        "draining": "" if worker is None else worker.draining,
        "cools": None if cools is None else _plain_number(cools - now),
        "stuck": worker is not None and worker.worker in state.stalled,
    }


def _stuck(state: DriverState | None) -> list[dict[str, Any]]:
    if state is None:
        return []
    found = []
    for name, why in _first(state.stalled.items(), MOST_STUCK):
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
