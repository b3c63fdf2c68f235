"""The summary of a fit survives saving."""

from __future__ import annotations

import json

from spark_elastic.estimators.transformer import FitSummary, WorldRecord
from spark_elastic.monitoring.report import JobReport, WorldChange, WorldChangeKind


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


def test_the_report_survives_json_and_older_summaries_have_none() -> None:
    report = JobReport(
        10.0, {"training": 9.0}, (WorldChange(1, 0.0, WorldChangeKind.START, 0, 2, 2, 0, "first", 0.5),)
    )
    summary = FitSummary("run", report=report.with_rows([{"epoch": 0, "rows": 5}], 5))
    assert FitSummary.from_json(summary.to_json()) == summary
    older = {key: value for key, value in json.loads(summary.to_json()).items() if key != "report"}
    older["settings"] = {}
    assert FitSummary.from_json(json.dumps(older)).report == JobReport()
