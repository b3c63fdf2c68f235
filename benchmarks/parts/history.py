"""What the ledgers of a run say: which steps and rows are in the final weights, and when the job made no progress.

Pure arithmetic over the lines that `benchmarks/peers/job.py` writes. Definitions:

- An execution is one step of one world. It counts as applied once one worker has written so. Its rows are those of its
  members: of those that wrote "applied", and, up to the execution's size, of those that died after "begun".
- A step may be executed several times, after a rollback. Its last execution is in the history, the others were rolled
  back. A row is due EPOCHS times in the history.
- Progress is a step higher than all before it. A fault costs the longest time without progress between it and the next
  fault. If a step was under way at the fault, that time begins with the fault; if it begins with a later step, the
  median time of a step is taken off.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass
class Execution:
    """One step of one world."""

    first: float = 0.0  # when a worker had first applied it
    size: int = 0  # workers whose rows are in it
    applied: dict[int, list[int]] = field(default_factory=dict)  # process id -> its rows
    begun: dict[int, list[int]] = field(default_factory=dict)  # the same, of those that may have died in it


@dataclass(frozen=True)
class Result:
    """One run."""

    steps: int  # applied, of those that were due
    startup: float  # seconds from the command to the first step
    seconds: float  # from the first step to the last
    missing: int  # times that rows were due and not trained
    doubled: int  # times that rows were trained beyond those due
    due: int  # rows × epochs
    rolled_back: int  # executions that are not in the history
    stalls: list[float]  # seconds without progress, per fault
    full: float  # share of the steps in the history that HOSTS workers took
    curve: list[float]  # share of the due rows that are in the history, at each second after the first step


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """All complete lines of a run, in the order of time, with the process that wrote them."""
    lines = []
    for path in folder.glob("*.jsonl"):
        lines += [
            {"pid": int(path.stem), **json.loads(text)}
            for text in path.read_text().split("\n")
            if text.endswith("}")
        ]
    return sorted(lines, key=lambda line: float(line["at"]))


def collect(lines: list[dict[str, Any]]) -> dict[tuple[int, int], Execution]:
    """(world, step) -> its execution, of those that were applied."""
    executions: dict[tuple[int, int], Execution] = defaultdict(Execution)
    for line in lines:
        execution = executions[line["world"], line["step"]]
        if line["kind"] == "applied":
            execution.applied[line["pid"]] = line["rows"]
            execution.first = execution.first or line["at"]
            execution.size = line["size"]
        else:
            execution.begun[line["pid"]] = line["rows"]
    return {key: execution for key, execution in executions.items() if execution.applied}


def find_rows(execution: Execution) -> list[int]:
    shares = [rows for rows in execution.applied.values() if rows]
    others = [rows for pid, rows in execution.begun.items() if pid not in execution.applied]
    shares += others[: max(0, execution.size - len(shares))]
    return [row for rows in shares for row in rows]


@dataclass(frozen=True)
class Task:
    """What the job was to do."""

    rows: int  # in the table
    epochs: int
    workers: int  # at the start


def judge(lines: list[dict[str, Any]], started: float, faults: list[float], task: Task) -> Result:
    """started: wall time of the command. faults: wall times."""
    executions = collect(lines)
    last: dict[int, Execution] = {}
    for (_, step), execution in sorted(executions.items(), key=lambda item: item[1].first):
        last[step] = execution
    counts: Counter[int] = Counter()
    taken = ((execution.first, find_rows(execution)) for execution in last.values())
    useful = [(first, _count(counts, rows, task.epochs)) for first, rows in taken]
    times, due = progress(executions), task.rows * task.epochs
    return Result(
        steps=len(last),
        startup=times[0] - started,
        seconds=times[-1] - times[0],
        missing=sum(max(0, task.epochs - counts[row]) for row in range(task.rows)),
        doubled=sum(max(0, count - task.epochs) for count in counts.values()),
        due=due,
        rolled_back=len(executions) - len(last),
        stalls=find_stalls(times, faults),
        full=sum(execution.size >= task.workers for execution in last.values()) / len(last),
        curve=make_curve(useful, times[0], times[-1], due),
    )


def _count(counts: Counter[int], rows: list[int], epochs: int) -> int:
    """Add the rows; how many of them were still due."""
    due = sum(counts[row] < epochs for row in rows)
    counts.update(rows)
    return due


def make_curve(useful: list[tuple[float, int]], begin: float, end: float, due: int) -> list[float]:
    seconds = range(int(end - begin) + 2)
    return [round(sum(n for at, n in useful if at <= begin + second) / due, 4) for second in seconds]


def progress(executions: dict[tuple[int, int], Execution]) -> list[float]:
    """When each step that was higher than all before it was applied."""
    times, highest = [], 0
    for (_, step), execution in sorted(executions.items(), key=lambda item: item[1].first):
        if step > highest:
            times.append(execution.first)
            highest = step
    return times


def find_stalls(times: list[float], faults: list[float]) -> list[float]:
    gaps = list(pairwise(times))
    usual = statistics.median(end - begin for begin, end in gaps)
    stalls = []
    for fault, until in zip(faults, [*faults[1:], float("inf")], strict=False):
        if fault < times[-1]:
            hit = [(begin, min(end, until)) for begin, end in gaps if end > fault and begin < until]
            stalls.append(max(end - fault if begin < fault else end - begin - usual for begin, end in hit))
    return stalls
