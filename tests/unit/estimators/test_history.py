"""The summary of a fit survives saving."""

from __future__ import annotations

from spark_elastic.estimators.history import FitSummary, WorldRecord


def test_a_summary_survives_json() -> None:
    summary = FitSummary(
        run_id="r",
        epochs=({"epoch": 0, "loss": 0.5, "rows": 10},),
        worlds=(WorldRecord(0.0, 3, "start"), WorldRecord(4.5, 2, "lost 0")),
        seconds=9.0,
        data_rows=10,
        digest="ab",
    )
    assert FitSummary.from_json(summary.to_json()) == summary
    assert summary.rows_per_epoch == [10]
