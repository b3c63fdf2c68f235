"""A report as a picture: loss, throughput and world size over time, with losses marked. matplotlib is optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_elastic.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spark_elastic.observe.report import JobReport


def figure(report: JobReport) -> Figure:
    """Three plots over one axis of seconds since the launch. Touches neither pyplot nor any window.

    Raises:
        InvalidInput: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("plot() needs matplotlib: pip install matplotlib.") from error
    made = Figure(figsize=(8, 6), layout="constrained")
    loss, rate, world = made.subplots(3, 1, sharex=True)
    known = [point for point in report.curve if point.loss is not None]
    loss.plot([point.at for point in known], [point.loss for point in known], color="tab:blue")
    loss.set_ylabel("loss")
    rate.plot(
        [point.at for point in report.curve],
        [point.rows_per_second for point in report.curve],
        color="tab:green",
    )
    rate.set_ylabel("rows/s")
    _steps(world, report)
    for axes in (loss, rate, world):
        for change in report.recoveries:
            axes.axvline(change.at, color="tab:red", alpha=0.4, linewidth=1)
    return made


def _steps(axes: Any, report: JobReport) -> None:
    times = [change.at for change in report.changes]
    sizes = [change.size for change in report.changes]
    if times:
        axes.step(
            [*times, max(report.seconds, times[-1])], [*sizes, sizes[-1]], where="post", color="tab:orange"
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("workers")
    axes.set_xlabel("seconds since the launch")
