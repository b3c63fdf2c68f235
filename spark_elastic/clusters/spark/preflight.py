"""Checks over a SparkContext whether each host can run a job, before rows are materialized or slots launched.

A preflight is a Spark job of short tasks, each a `probe.Probe`; the calling thread waits for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark import InheritableThread

from spark_elastic.clusters.spark.host_facts import mark_jobs
from spark_elastic.clusters.spark.payload import broadcast, destroy
from spark_elastic.clusters.spark.probe import (
    ProbeReport,
    ProbeSpec,
    Task,
    await_probes,
    check_reports,
    make_probe_task,
    open_probe,
    require_report,
)
from spark_elastic.driver.gang_scheduler import get_job_queue
from spark_elastic.errors import JobCancelled, PreflightError
from spark_elastic.monitoring.logs import announce_phase

if TYPE_CHECKING:
    from pyspark import SparkContext

ROUNDS = 3  # jobs of probes to reach every executor; busy ones are checked when their slot registers


def preflight(sc: SparkContext, spec: ProbeSpec, timeout: float, number: int = 1) -> list[dict[str, str]]:
    """Probe the live executors; returns the facts of each.

    Args:
        timeout: seconds in which executors must answer; they do not count while another job of the application trains.
        number: of workers, whose imports probes begin where they can.

    Raises:
        InvalidInput: the program is too large for Spark's driver.
        PreflightError: a host cannot run the job, or none answered.
        StoreError: the driver cannot write to the store.
    """
    program = broadcast(sc, spec.payload, spec.what)
    try:
        with open_probe(spec) as probe:
            tag = f"spark_elastic-preflight-{probe.token}"
            has_imports = spec.slot is not None and spec.slot.forks_imports
            least = min(number, sc.defaultParallelism) if has_imports else 1
            if _count_live_executors(sc) == 1:
                probe = replace(probe, hold=0.0)
            task = make_probe_task(probe, program)
            reports = _probe_executors(sc, task, ProbeJob(tag, timeout, number), least)
            check_reports(reports, spec.make_host_check(), spec.store)
    finally:
        destroy(program)
    return list({report.executor: report.facts for report in reports}.values())


@dataclass(frozen=True)
class ProbeJob:
    """What the Spark jobs of a preflight have in common."""

    tag: str  # their tag, which begins their description
    timeout: float  # seconds in which they must end
    workers: int = 1  # number of workers that the job wants


def _probe_executors(sc: SparkContext, task: Task, job: ProbeJob, least: int) -> list[ProbeReport]:
    """Spark assigns tasks to executors in turns: as many tasks as executors reach each idle executor.

    least: number of probes.
    """
    reports: list[ProbeReport] = []
    for attempt in range(1, ROUNDS + 1):
        executors = _count_live_executors(sc)
        if attempt == 1:
            announce_phase("checking the host" if executors == 1 else f"checking {executors} hosts")
        for answer in _run_probes(sc, task, max(executors * attempt, least), job):
            reports.append(require_report(answer))
        if len({report.executor for report in reports}) >= executors or any(
            r.fault or r.unreached for r in reports
        ):
            break
    return reports


def _count_live_executors(sc: SparkContext) -> int:
    try:
        registered = len(sc._jsc.sc().statusTracker().getExecutorInfos())
    except (Py4JError, AttributeError):  # users are denied access: one probe for each core
        return sc.defaultParallelism
    return max(1, registered - 1)  # the driver is one of them


def _run_probes(sc: SparkContext, task: Task, tasks: int, job: ProbeJob) -> list[Any]:
    """Run one Spark job; cancel it if the time is over or the caller is interrupted."""

    tag, timeout = job.tag, job.timeout

    def collect() -> list[Any]:
        with mark_jobs(sc, "probes of the hosts", tag):
            try:
                return sc.parallelize(range(tasks), tasks).mapPartitions(task).collect()
            except Exception as error:
                raise _translate_error(error) from error

    return await_probes(
        collect,
        lambda: sc.cancelJobsWithTag(tag),
        get_job_queue(sc),
        timeout,
        InheritableThread,
        lambda: _explain_delay(sc, job),
    )


def _explain_delay(sc: SparkContext, job: ProbeJob) -> str | None:
    """Why the probes have not ended, in one sentence; None: it is not known."""
    try:
        tracker = sc._jsc.sc().statusTracker()
        stages = [
            tracker.getStageInfo(stage).get()
            for number in tracker.getJobIdsForTag(job.tag)
            for stage in tracker.getJobInfo(number).get().stageIds()
        ]
        running = sum(stage.numActiveTasks() for stage in stages)
        cores = sc.defaultParallelism
    except (Py4JError, AttributeError):  # users are denied access, or an older Spark
        return None
    if running:
        return (
            f"{running} probes of the hosts were still loading the program after {job.timeout:.0f} s (start_timeout): "
            "see why imports take long there (a busy machine, Python on a network drive), or raise start_timeout."
        )
    return (
        f"no executor took a probe within {job.timeout:.0f} s (start_timeout), while the job wants {job.workers} slots "
        f"and Spark counts {cores} cores: free some of them, or raise start_timeout."
    )


def _translate_error(error: Exception) -> Exception:
    """Our error for Spark's words about an unsuitable Python or a cancelled job; any other error as it is."""
    text = str(error)
    versions = re.search(
        r"Python in worker has different version:? (.+?) than that in driver:? (.+?), PySpark", text
    )
    if versions:
        place = re.search(r"\(TID \d+\) \(([^ )]+)", text)
        return PreflightError(
            f"host {place.group(1) if place else 'unknown'} has python {versions.group(1)}, and the driver has "
            f"{versions.group(2)}: set PYSPARK_PYTHON to the same version on both."
        )
    if "cancelled" in text:
        return JobCancelled("the job was cancelled while its hosts were probed.")
    return error
