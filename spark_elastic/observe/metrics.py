"""A snapshot in Prometheus' text format. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from spark_elastic.observe.progress import PLACE

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
