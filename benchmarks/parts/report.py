"""How every benchmark reports: one table for people, one JSON file for the record.

Owns the form alone and measures nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.parts.budget import BUDGET


@dataclass(frozen=True)
class Row:
    """One case: our figure and a peer's in the same unit and the same run; a missing peer is None."""

    case: str
    ours: float
    peer: float | None = None
    unit: str = "s"

    @property
    def ratio(self) -> float | None:
        """ours / peer: below 1 is better where the unit is a time."""
        return None if not self.peer else self.ours / self.peer


def machine() -> str:
    """The machine in words: processor, cores, memory, Python. No name of a host."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def find_commit() -> str:
    """The commit of this code, with a + if something was changed since; "" outside of a checkout."""
    command = ("git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+")
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def table(rows: Sequence[Row]) -> str:
    """Aligned columns: case, ours, peer, unit, ratio."""
    head = ("case", "ours", "peer", "unit", "ratio")
    cells = [head, *((r.case, _format(r.ours), _format(r.peer), r.unit, _format(r.ratio)) for r in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def describe_record(name: str) -> dict[str, str]:
    """What each record begins with."""
    date = time.strftime("%Y-%m-%d")
    return {"name": name, "machine": machine(), "commit": find_commit(), "date": date}


def finish(name: str, rows: Sequence[Row], path: Path | None, keeps: bool = False) -> None:
    """Print the table and, with a path, write the record. keeps: its rows of cases that were not measured."""
    print(f"{name} ({machine()})")
    print(table(rows))
    for case in BUDGET.left_out:
        print(f"left out for lack of time: {case}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if keeps and path.exists():
            measured = {row.case for row in rows}
            recorded = [row for row in json.loads(path.read_text())["rows"] if row["case"] not in measured]
            rows = [*(Row(r["case"], r["ours"], r["peer"], r["unit"]) for r in recorded), *rows]
        left_out = {"left out": BUDGET.left_out} if BUDGET.left_out else {}
        lines = [{**asdict(row), "ratio": row.ratio} for row in rows]
        path.write_text(json.dumps({**describe_record(name), **left_out, "rows": lines}, indent=1) + "\n")


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
