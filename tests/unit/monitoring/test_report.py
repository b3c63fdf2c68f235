"""The report: its figures, its curves in bounded memory, its way through JSON, and its picture."""

from __future__ import annotations

import html
import json
import re
import textwrap

import pytest

from spark_elastic.monitoring.report import (
    EpochRows,
    JobReport,
    MetricPoint,
    MetricSeries,
    Throughput,
    WorldChange,
    WorldChangeKind,
)
from tests.sources import ROOT


def loss(seconds: float | None, steps_lost: int = 0) -> WorldChange:
    return WorldChange(2, 5.0, WorldChangeKind.LOSS, 3, 2, 0, 1, "host b is lost", seconds, steps_lost)


REPORT = JobReport(
    seconds=100.0,
    phases={"start": 5.0, "training": 91.0, "recovery": 4.0, "planned": 0.0, "closing": 0.0},
    world_changes=(
        WorldChange(1, 0.0, WorldChangeKind.START, 0, 3, 3, 0, "first", 5.0),
        loss(1.0, 1),
        loss(None),
        loss(3.0),
    ),
    curve=(MetricPoint(6.0, 1, 0.5, 100.0, 3), MetricPoint(7.0, 2, None, 90.0, 2)),
    checkpoints=2,
    checkpoint_seconds=1.0,
)


FITTED = JobReport(
    seconds=100.0,
    world_changes=(loss(1.0),),
    curve=(MetricPoint(4.0, 2, 0.5, 100.0, 3), MetricPoint(9.0, 8, 0.5, 90.0, 2)),
).with_rows(
    [
        {"epoch": 0, "rows": 10, "steps": 4, "loss": 0.75, "val_loss": 1.0, "seconds": 1.5},
        {"epoch": 1, "rows": 10, "steps": 4, "loss": 0.5, "val_loss": 0.625, "worlds": [2]},
    ],
    10,
)


def test_a_report_computes_goodput_recoveries_and_lost_steps() -> None:
    assert REPORT.goodput == pytest.approx(0.9)
    assert len(REPORT.recoveries) == 3
    assert (REPORT.recovery_seconds(50), REPORT.recovery_seconds(99), REPORT.steps_lost) == (1.0, 3.0, 1)
    assert JobReport().recovery_seconds(50) is None
    assert JobReport().goodput == 0.0


def test_missing_and_duplicated_rows_are_counted_against_the_plan() -> None:
    history = [{"epoch": 0, "rows": 100}, {"epoch": 1, "rows": 97}, {"epoch": 2, "rows": 101}]
    history.append({"epoch": 3, "rows": 38, "planned": 40})  # a callback ended the training there
    assert REPORT.with_rows(history, 100).epochs == (
        EpochRows(0, 100, 0, 0), EpochRows(1, 97, 3, 0), EpochRows(2, 101, 0, 1), EpochRows(3, 38, 2, 0)
    )  # fmt: skip


def test_a_report_of_a_short_job_prints_no_goodput_and_its_repr_is_short() -> None:
    short = JobReport(seconds=20.8, phases={"start": 18.0, "training": 2.0})
    assert str(short).splitlines()[:2] == [
        "20.8 s: start 18.0 s, training 2.0 s, recovery 0.0 s, planned 0.0 s, closing 0.0 s",
        "no worker was lost",
    ]
    assert repr(REPORT) == "<JobReport of 100.0 s, 3 recoveries; print() shows more>"


def test_the_example_in_the_docs_is_what_a_report_prints() -> None:
    report = JobReport(
        seconds=62.4,
        phases={"start": 1.9, "training": 59.36, "recovery": 0.8, "planned": 0.2, "closing": 0.1},
        world_changes=(loss(0.31, 1), loss(0.49)),
        checkpoints=3,
        checkpoint_seconds=0.02,
        reserved_hours=0.068,
        useful_hours=0.063,
        epochs=(EpochRows(0, 60000, 0, 0),),
    )
    assert textwrap.indent(str(report), "    ") in (ROOT / "docs" / "report.md").read_text()


def test_a_plot_of_a_fit_shows_training_and_validation_by_epoch_with_the_losses_where_they_were() -> None:
    pytest.importorskip("matplotlib")
    *over_time, by_epoch = FITTED.plot().axes
    for axes in (over_time, REPORT.plot().axes, JobReport().plot().axes):
        assert [part.get_ylabel() for part in axes] == ["loss", "rows/s", "workers"]
    lines = {line.get_label(): line for line in by_epoch.get_lines()}
    assert list(lines["training"].get_ydata()) == [0.75, 0.5]
    assert list(lines["validation"].get_ydata()) == [1.0, 0.625]
    marks = [line for line in by_epoch.get_lines() if str(line.get_label()).startswith("_")]
    assert [line.get_xdata()[0] for line in marks] == [0.5]


def test_a_fits_figures_by_epoch_survive_json_and_older_reports_have_none() -> None:
    assert JobReport.from_json(FITTED.to_json()) == FITTED
    older = json.loads(FITTED.to_json())
    for epoch in older["epochs"]:
        del epoch["steps"], epoch["figures"]
    report = JobReport.from_json(json.dumps(older))
    assert report.describe()["epochs"] == [{"epoch": 1}, {"epoch": 2}]
    assert [change["epoch"] for change in report.describe()["world_changes"]] == [None]


def test_a_notebook_shows_the_page_of_a_report_in_a_frame_of_its_own() -> None:
    shell = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    data, _ = shell.format(FITTED)
    assert data["text/plain"].startswith("<JobReport of 100.0 s")
    frames = r'<iframe sandbox="allow-scripts" srcdoc="([^"]*)"[^>]*></iframe>'
    (frame,) = re.findall(frames, data["text/html"])
    assert html.unescape(frame) == FITTED.to_html("the job")


def test_a_metric_series_is_thinned_and_keeps_its_ends_and_means() -> None:
    curve = MetricSeries(max_points=8)
    for number in range(1000):
        curve.add(MetricPoint(float(number), number, float(number % 2), 10.0, 3))
    points = curve.points
    assert len(points) <= 9
    assert points[-1].at == 999.0
    assert [point.at for point in points] == sorted(point.at for point in points)
    assert points[0].loss == pytest.approx(0.5)
    assert {point.rows_per_second for point in points} == {10.0}
    short = MetricSeries(max_points=8)
    for number in range(9):
        assert [point.at for point in short.points] == list(range(number))
        short.add(MetricPoint(float(number), number, None, 0.0, 1))
    assert [point.at for point in short.points] == [1.0, 3.0, 5.0, 7.0, 8.0]


def numbers(epoch: int, step: int) -> dict[str, int]:
    return {"epoch": epoch, "epochs": 2, "step": step, "steps": 100, "rows": 32}


def test_throughput_and_time_left_span_epochs() -> None:
    speed = Throughput()
    assert speed.seconds_left is None
    speed.add(0.0, numbers(0, 90))
    speed.add(2.0, numbers(1, 10))
    assert speed.steps_per_second == 10.0
    assert speed.rows_per_second == 320.0
    assert speed.seconds_left == 9.0


def test_throughput_forgets_old_steps_and_those_undone_by_a_checkpoint() -> None:
    speed = Throughput(window=5.0)
    for second in range(20):
        speed.add(float(second), numbers(0, second if second < 10 else 10 + 3 * (second - 10)))
    assert speed.steps_per_second == 3.0
    speed.add(20.0, numbers(0, 5))
    assert speed.steps_per_second == 0.0
    assert speed.seconds_left is None


@pytest.mark.parametrize(
    ("every", "still", "stands"),
    [(0.25, 4.9, False), (0.25, 5.1, True), (60.0, 170.0, False), (60.0, 190.0, True)],
)
def test_a_run_is_stalled_after_three_of_its_usual_report_intervals(
    every: float, still: float, stands: bool
) -> None:
    speed = Throughput(window=5.0)
    assert speed.is_stale(0.0)
    for number in range(10):
        speed.add(number * every, numbers(0, number))
    assert speed.is_stale(9 * every + still) is stands
