"""The program of docs/moving-from-torchdistributor.md with its diffs, on a real cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.pages import apply_diff, blocks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.native]


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_program_for_torchdistributor_runs(spark: SparkSession, number: int) -> None:
    before, _ = blocks("moving-from-torchdistributor.md", "python")
    program = apply_diff(before, blocks("moving-from-torchdistributor.md", "diff")[number])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "moving.py", "exec"), names)
    assert [size for size, _ in names["results"]] == [2] * len(names["results"]) or number == 2
    assert len(names["results"]) >= 2
    assert all(loss < 0.1 for _, loss in names["results"])
