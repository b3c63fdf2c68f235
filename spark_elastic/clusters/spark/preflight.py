"""The driver's side of probes: it awaits them, and turns the first fault that they report into an error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.spark.probe import SHARE, Probe, ProbeReport
from spark_elastic.driver.gang_scheduler import JobQueue, QueueTimeout
from spark_elastic.errors import ElasticError, PreflightError

CANCEL_SECONDS = 5.0  # for the end of a job that was cancelled


def await_probes(
    collect: Callable[[], list[Any]],
    cancel: Callable[[], object],
    queue: JobQueue,
    timeout: float,
    make_thread: Callable[..., threading.Thread] = threading.Thread,
    explain: Callable[[], str | None] = lambda: None,
) -> list[Any]:
    """Run a job of probes in a thread of its own; cancel it if the time is over or the caller is interrupted. timeout:
    seconds; they do not count while another job of the application trains. explain: what the cluster was doing when the
    time was over, if that is known; called before `cancel`. Raises PreflightError: the time was over."""
    collected: Future[list[Any]] = Future()

    def work() -> None:
        try:
            collected.set_result(collect())
        except Exception as error:
            collected.set_exception(error)

    queue_timeout = QueueTimeout(queue, timeout, SystemClock(), "the preflight of a job")
    thread = make_thread(target=work, name="spark-elastic-preflight", daemon=True)
    thread.start()
    late, why = True, None
    try:
        late = not queue_timeout.join(thread)
        why = explain() if late else None
    finally:
        if late:
            cancel()
            thread.join(CANCEL_SECONDS)
    if late:
        advice = "see whether the cluster has free cores, or raise start_timeout."
        raise PreflightError(why or f"no executor took a probe within {timeout:.0f} s: {advice}")
    return collected.result(0)


def require_report(answer: Any) -> ProbeReport:
    """The answer of a probe. Raises PreflightError: it could not be loaded, as the host has no spark_elastic."""
    if isinstance(answer, ProbeReport):
        return answer
    host, reason, interpreter = answer
    own = f"spark_elastic {spark_elastic.__version__}"
    raise PreflightError(
        f"host {host} cannot load spark_elastic with {interpreter} ({reason}), and the driver has {own} in "
        f"{sys.executable}: set PYSPARK_PYTHON to a Python that has it on every host, install {own} there, or send it "
        "along with ship=True."
    )


def check_reports(probe: Probe, reports: list[ProbeReport], reached: bool = True) -> list[dict[str, str]]:
    """Check what all hosts found; returns the facts of each executor. reached: hosts must reach the driver. Raises
    PreflightError: a host has a fault, or the driver does not see what a host wrote to the store."""
    # Versions first: they explain why a program does not load.
    faults = [*map(probe.make_host_check(), (report.facts for report in reports))]
    faults += [report.fault for report in reports]
    faults += [report.unreached for report in reports if reached]
    for fault in filter(None, faults):
        raise PreflightError(fault)
    store = probe.store
    for report in reports if store is not None else []:
        assert store is not None
        try:
            store.read_bytes(report.written)
        except (ElasticError, OSError) as error:
            raise PreflightError(
                f"the driver does not see what host {report.facts['host']} wrote to the store {store.url}: {SHARE}"
            ) from error
    return list({report.executor: report.facts for report in reports}.values())
