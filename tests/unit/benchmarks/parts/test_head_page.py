"""The tables of the page on the head to head, from a record that was written by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.parts.head_page import make_row, make_tables, spread


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
