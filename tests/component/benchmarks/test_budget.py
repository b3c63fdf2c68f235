"""A benchmark ends in time, and says what it left out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.parts.budget import limit_time, within_budget
from benchmarks.parts.report import Row, finish


def test_cases_that_would_not_end_in_time_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = []
    with limit_time(2):
        for outer in within_budget(("a", "b"), "outer"):
            for seconds in within_budget((0.01, 1.2, 0.4), f"{outer}, seconds:"):
                time.sleep(seconds)
                taken.append((outer, seconds))
        finish("name", [Row("case", 1.0)], tmp_path / "name.json")
    assert taken == [("a", 0.01), ("a", 1.2)]
    left_out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert left_out == [f"left out for lack of time: {case}" for case in ("a, seconds: 0.4", "outer b")]
    assert '"left out"' in (tmp_path / "name.json").read_text()


def test_a_case_that_takes_twice_the_time_of_all_is_stopped_by_name() -> None:
    def measure() -> None:
        with limit_time(0.2):
            for seconds in within_budget((10,), "sleep"):
                time.sleep(seconds)

    with pytest.raises(TimeoutError, match=r"at: sleep 10"):
        measure()


def test_without_a_limit_all_cases_are_measured() -> None:
    assert list(within_budget(range(5), "number")) == [0, 1, 2, 3, 4]
