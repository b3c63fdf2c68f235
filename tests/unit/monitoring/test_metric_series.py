"""Curves in bounded memory, and the speed of a run."""

from __future__ import annotations

import pytest

from spark_elastic.monitoring.report import MetricPoint, MetricSeries, Throughput


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


def test_a_short_metric_series_is_kept_as_it_is() -> None:
    curve, points = MetricSeries(max_points=8), [MetricPoint(float(n), n, None, 0.0, 1) for n in range(8)]
    for point in points:
        curve.add(point)
    assert curve.points == tuple(points)


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
