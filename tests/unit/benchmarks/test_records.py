"""Records and their tables, from runs and ledgers that were written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.head_page import make_row, make_tables, spread
from benchmarks.parts.history import Task, judge, read_lines
from benchmarks.parts.report import Row, finish

ROWS = [Row("kill a child", 0.05, 0.5), Row("alone", 12.0, unit="rows/s")]


def test_a_record_is_printed_and_written_in_the_agreed_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "recovery.json"
    finish("recovery", ROWS, path)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "case          ours  peer  unit    ratio",
        "kill a child  0.05  0.5   s       0.1",
        "alone         12    -     rows/s  -",
    ]
    record = json.loads(path.read_text())
    assert set(record) == {"name", "machine", "commit", "date", "rows"}
    assert re.fullmatch(r"([0-9a-f]{8,}\+?)?", record["commit"])
    assert record["rows"] == [
        {"case": "kill a child", "ours": 0.05, "peer": 0.5, "unit": "s", "ratio": 0.1},
        {"case": "alone", "ours": 12.0, "peer": None, "unit": "rows/s", "ratio": None},
    ]


# ---- the page on the head to head


def entry(peer: str, plan: str, repeat: int, **values: Any) -> dict[str, Any]:
    run = {"peer": peer, "plan": plan, "repeat": repeat, "steps": 10, "startup": 2.0, "seconds": 10.0}
    run |= {"missing": 0, "doubled": 0, "due": 1000, "rolled_back": 0, "stalls": [], "faults": []}
    return run | {"finished": True, "distance": None} | values


FAULTS: dict[str, Any] = {"faults": [4.0, 8.0]}
LOSSES: dict[str, Any] = {"missing": 200, "stalls": [1.0, 3.0], "distance": 0.25}


RECORD = {
    "steps": 10,
    "runs": [
        entry("torchft", "none", 0),
        entry("torchft", "kill", 0, seconds=16.0, **LOSSES, **FAULTS),
        entry("torchft", "kill", 1, seconds=20.0, steps=7, finished=False, **FAULTS),
    ],
}


def test_goodput_counts_due_rows_over_time_and_a_run_that_lost_rows_does_not_gain_by_it() -> None:
    row = make_row(RECORD, "torchft", "kill")
    assert row == "| torchft | 2 | 16.0 (16.0–20.0) | 0.500 | 0 (0–200) | 0 | 0 | 2.00 | 2.5e-01 |"


def test_a_run_that_did_not_finish_is_named() -> None:
    assert "torchft, run 2: did not finish; it reached 7 of 10 steps." in make_tables(RECORD)


def test_spread_shows_the_range_only_where_it_reads_differently() -> None:
    assert spread([1.01, 1.02], ".1f") == "1.0"
    assert spread([3, 1, 2], "d") == "2 (1–3)"
    assert spread([], "d") == "–"


# ---- what the ledgers of a run say


TASK = Task(rows=4, epochs=1, workers=2)


def line(pid: int, at: float, world: int, step: int, *rows: int, kind: str = "applied") -> dict[str, Any]:
    return {"pid": pid, "kind": kind, "at": at, "world": world, "step": step, "size": 2, "rows": list(rows)}


def test_an_undisturbed_run_has_each_row_once() -> None:
    lines = [line(1, 1.0, 1, 1, 0), line(2, 1.0, 1, 1, 1), line(1, 2.0, 1, 2, 2), line(2, 2.0, 1, 2, 3)]
    result = judge(lines, 0.5, [], TASK)
    assert (result.steps, result.missing, result.doubled, result.rolled_back) == (2, 0, 0, 0)
    assert (result.startup, result.seconds, result.full, result.due) == (0.5, 1.0, 1.0, 4)
    assert result.curve == [0.5, 1.0, 1.0]


def test_a_step_that_is_taken_again_counts_once_and_was_rolled_back_once() -> None:
    lines = [line(1, 1.0, 1, 1, 0, 1), line(1, 2.0, 1, 2, 2, 3), line(1, 5.0, 2, 2, 2, 3)]
    result = judge(lines, 0.0, [], TASK)
    assert (result.steps, result.missing, result.doubled, result.rolled_back) == (2, 0, 0, 1)


def test_rows_of_a_worker_that_died_before_it_could_write_are_in_the_step_that_the_survivor_applied() -> None:
    begun = line(2, 0.9, 1, 1, 1, kind="begun")
    assert judge([begun, line(1, 1.0, 1, 1, 0), line(1, 2.0, 1, 2, 2, 3)], 0.0, [], TASK).missing == 0


def test_rows_of_a_step_that_was_never_applied_are_missing() -> None:
    lines = [line(1, 1.0, 1, 1, 0, 1), line(1, 2.0, 1, 2, 2, 3, kind="begun"), line(1, 3.0, 2, 3, 1)]
    result = judge(lines, 0.0, [], TASK)
    assert (result.missing, result.doubled) == (2, 1)


def test_a_stall_lasts_until_a_step_beyond_all_before_the_fault() -> None:
    steps = [line(1, 1.0 + n, 1, n + 1, 0) for n in range(5)]
    redone = [line(1, 10.0 + n, 2, n + 3, 0) for n in range(5)]  # steps 3 to 7
    result = judge([*steps, *redone], 0.0, [5.5], TASK)
    assert result.stalls == [13.0 - 5.5]  # step 6 ends it
    assert result.rolled_back == 3


def test_a_stall_that_lasts_beyond_the_next_fault_is_divided_between_both() -> None:
    lines = [line(1, at, 1, step + 1, 0) for step, at in enumerate((1.0, 2.0, 3.0, 13.0, 14.0))]
    assert judge(lines, 0.0, [3.5, 10.0], TASK).stalls == [6.5, 3.0]


def test_a_stall_that_begins_some_steps_after_the_fault_is_less_a_usual_step() -> None:
    lines = [line(1, at, 1, step + 1, 0) for step, at in enumerate((1.0, 2.0, 3.0, 4.0, 9.0, 10.0))]
    assert judge(lines, 0.0, [2.5], TASK).stalls == [4.0]


def test_a_fault_after_the_last_step_costs_nothing() -> None:
    assert judge([line(1, 1.0, 1, 1, 0), line(1, 2.0, 1, 2, 1)], 0.0, [9.0], TASK).stalls == []


def test_a_line_that_was_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    whole = {"kind": "applied", "at": 1.0, "world": 1, "step": 1, "size": 1, "rows": [0]}
    (tmp_path / "12.jsonl").write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:30])
    assert read_lines(tmp_path) == [{"pid": 12, **whole}]
