"""Before anything is materialised or launched: can each host run this job? Versions, the pickled program, the way to
the driver, the store.

One Spark job of short tasks, each a `probe.Probe`; the calling thread waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark import InheritableThread

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.data.store import Store
from spark_elastic.driver.gathering import Patience, application_of
from spark_elastic.errors import ElasticError, JobCancelled, PreflightError
from spark_elastic.spark.address import collect_host_facts
from spark_elastic.spark.launcher import set_description
from spark_elastic.spark.payload import broadcast
from spark_elastic.spark.probe import ProbeReport, ProbeSpec, Task, make_probe_task, open_probe

if TYPE_CHECKING:
    from pyspark import SparkContext


# What the answers of probes mean for a job: the first reason against it, as an error.


def require_report(answer: Any) -> ProbeReport:
    """Raises PreflightError where a probe found no spark_elastic to load."""
    if isinstance(answer, ProbeReport):
        return answer
    host, reason = answer
    version = spark_elastic.__version__
    raise PreflightError(
        f"host {host} cannot load spark_elastic ({reason}), and the driver has {version}: install "
        f"spark_elastic {version} there, or send it along with ship=True."
    )


def check_reports(
    reports: list[ProbeReport],
    judge: Callable[[Mapping[str, Any]], str | None],
    store: Store | None,
    reached: bool = True,
) -> None:
    """Raises PreflightError with what the first host lacks, or where the driver does not see what a host wrote.

    reached: hosts must reach the driver.
    """
    # Versions first: they explain why a program does not load.
    faults = [*(judge(report.facts) for report in reports), *(report.fault for report in reports)]
    for fault in [*faults, *(report.unreached for report in reports if reached)]:
        if fault is not None:
            raise PreflightError(fault)
    for report in reports if store is not None else []:
        assert store is not None
        try:
            store.read_bytes(report.written)
        except (ElasticError, OSError) as error:
            raise PreflightError(
                f"the driver does not see what host {report.facts['host']} wrote to the store {store.url}: "
                "choose a place that all machines share, such as s3://, hdfs:// or a network drive."
            ) from error


# Which hosts may take part in a job, from their versions alone. Pure.
#
# What must match: spark_elastic exactly (hosts speak its wire format), Python to the minor (cloudpickle carries
# bytecode), numpy and the frameworks to the major (where pickles and kernels change; a driver and its executors may
# well have different builds of one release line).


# Package -> how many leading parts of its version must be equal; None: all of it.
MUST_MATCH: dict[str, int | None] = {
    "spark_elastic": None,
    "python": 2,
    "numpy": 1,
    "torch": 1,
    "tensorflow": 1,
    "keras": 1,
}
ALWAYS_NEEDED = ("spark_elastic", "python", "numpy")


def make_version_check(
    driver: Mapping[str, Any], needs: tuple[str, ...] = ()
) -> Callable[[Mapping[str, Any]], str | None]:
    """A judge of hosts: given a host's facts, why it cannot take part in a job of this driver, or None.

    needs: frameworks that the job uses. One that it does not use may be missing or of any version.
    """
    packages = [p for p in MUST_MATCH if p in ALWAYS_NEEDED or p in needs]

    def judge(host: Mapping[str, Any]) -> str | None:
        for package in packages:
            here, there = driver.get(package), host.get(package)
            if here is None or (there is not None and _agree(str(here), str(there), MUST_MATCH[package])):
                continue
            name = host.get("host", "unknown")
            if there is None:
                return f"host {name} has no {package}, and the driver has {here}: install {package} {here} there."
            return (
                f"host {name} has {package} {there}, and the driver has {here}: "
                f"install {package} {here} on one of them to match."
            )
        return None

    return judge


def _agree(here: str, there: str, parts: int | None) -> bool:
    if parts is None:
        return here == there
    return here.split(".")[:parts] == there.split(".")[:parts]


ROUNDS = 3  # tries to reach every executor; busy ones are judged when their slot joins


def preflight(sc: SparkContext, spec: ProbeSpec, timeout: float) -> list[dict[str, str]]:
    """Probe the live executors; returns the facts of each.

    timeout: seconds until some executor must have answered, while no other job of the application trains.

    Raises:
        InvalidInput: the program is too large for Spark's driver.
        PreflightError: a host cannot run the job, or none answered. StoreError: the driver cannot write the store.
    """
    program = broadcast(sc, spec.payload, spec.what)
    try:
        with open_probe(spec) as probe:
            tag = f"spark_elastic-preflight-{probe.token}"
            reports = _probe_executors(sc, make_probe_task(probe, program), tag, timeout)
            check_reports(reports, make_version_check(collect_host_facts(), spec.needs), spec.store)
    finally:
        program.unpersist()
    return list({report.executor: report.facts for report in reports}.values())


def _probe_executors(sc: SparkContext, task: Task, tag: str, timeout: float) -> list[ProbeReport]:
    """Spark deals tasks out in turns, so that as many tasks as executors reach each that is idle."""
    reports: list[ProbeReport] = []
    for attempt in range(1, ROUNDS + 1):
        executors = _live_executors(sc)
        for answer in _run_probes(sc, task, executors * attempt, tag, timeout):
            reports.append(require_report(answer))
        if len({report.executor for report in reports}) >= executors or any(
            r.fault or r.unreached for r in reports
        ):
            break
    return reports


def _live_executors(sc: SparkContext) -> int:
    try:
        registered = len(sc._jsc.sc().statusTracker().getExecutorInfos())
    except (Py4JError, AttributeError):  # where users are denied that: as many as there are cores
        return sc.defaultParallelism
    return max(1, registered - 1)  # the driver is one of them


def _run_probes(sc: SparkContext, task: Task, tasks: int, tag: str, timeout: float) -> list[Any]:
    """One Spark job, cancelled when the time is over or the caller is interrupted."""
    answers: list[Any] = []
    errors: list[Exception] = []

    def work() -> None:
        sc.addJobTag(tag)
        set_description(sc, "probes of the hosts")
        try:
            answers.extend(sc.parallelize(range(tasks), tasks).mapPartitions(task).collect())
        except Exception as error:  # raised below, in the caller's thread
            errors.append(error)
        finally:
            sc.removeJobTag(tag)

    patience = Patience(application_of(sc), timeout, SystemClock(), "the preflight of a job")
    thread = InheritableThread(target=work, name="spark-elastic-preflight", daemon=True)
    thread.start()
    late = True
    try:
        late = not patience.join(thread)
    finally:
        if late:
            sc.cancelJobsWithTag(tag)
            thread.join(timeout=5.0)
    if late:
        raise PreflightError(
            f"no executor took a probe within {timeout:.0f} s: see whether the cluster has free cores, or raise "
            "start_timeout."
        )
    if errors:
        raise _translate_error(errors[0]) from errors[0]
    return answers


def _translate_error(error: Exception) -> Exception:
    """Spark's own words for a Python that it cannot work with, or for a cancelled job, as ours."""
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
