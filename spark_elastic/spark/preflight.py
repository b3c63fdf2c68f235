"""Before anything is materialised or launched: can each host run this job? Versions, the pickled program, the way to
the driver, the store.

`facts` and `admit` are pure and also serve slots that join later; `preflight` runs one Spark job of short tasks, and
waits for it in the calling thread. What must match: spark_elastic exactly (hosts speak its wire format), Python to
the minor (cloudpickle carries bytecode), numpy and the frameworks to the major (where pickles and kernels change; a
driver and its executors may well have different builds of one release line).
"""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import platform
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import cloudpickle
from py4j.protocol import Py4JError
from pyspark import InheritableThread

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError, JobCancelled, PreflightError
from spark_elastic.rendezvous.serving import Bind, dialled, listen
from spark_elastic.spark.meeting import Meeting
from spark_elastic.spark.own_address import own_address

if TYPE_CHECKING:
    from pyspark import Broadcast, SparkContext

Task: TypeAlias = Callable[[Iterable[int]], Iterator[Any]]

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
HOLD_SECONDS = 0.2  # a probe keeps its core so long, so that the next one goes to another executor
ROUNDS = 3  # tries to reach every executor; busy ones are judged when their slot joins
REACH_SECONDS = 5.0  # for a connection to the driver
PROBES = "probes"


def facts() -> dict[str, str]:
    """This process's host name and the versions of what is installed; imports none of it."""
    found = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "spark_elastic": spark_elastic.__version__,
    }
    for package in ("numpy", "torch", "tensorflow", "keras"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def admit(
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


@dataclass(frozen=True)
class Report:
    """What a probe found. process: tells executors apart. fault: one sentence, or None. unreached: the same, of the way
    to the driver."""

    facts: dict[str, str]
    process: int
    written: str
    fault: str | None
    unreached: str | None = None

    @property
    def executor(self) -> tuple[str, int]:
        return self.facts["host"], self.process


class Brought(Protocol):
    """What a task finds where there are no broadcasts."""

    @property
    def value(self) -> bytes: ...


@dataclass(frozen=True)
class Probe:
    """The body of a probing task. It returns what went wrong; raising would only make Spark try again.

    what: the program in words. driver: the address that workers will dial. together: so many probes see, at `towards`,
    whether they reach one another; 0: not looked at.
    """

    store: Store | None
    token: str
    what: str = "the model, optimizer or loss"
    driver: str | None = None
    together: int = 0
    towards: str | None = None

    def report(self, number: int, program: bytes) -> Report:
        found = facts()
        name = f"{PROBES}/{self.token}/{found['host']}-{os.getpid()}-{number}"
        host = found["host"]
        fault = self._load(host, program) or self._visit_store(host, name) or self._meet(host)
        unreached = self._reach_driver(host)
        SystemClock().sleep(HOLD_SECONDS)
        # The parent is the executor's Python daemon: one per executor.
        return Report(found, os.getppid(), name, fault, unreached)

    def _meet(self, host: str) -> str | None:
        if self.store is None or self.together < 2:
            return None
        meeting = Meeting(self.store, f"{PROBES}/{self.token}/meeting", own_address(self.towards))
        refused = meeting.hold(self.together, SystemClock())
        return refused and (
            f"host {host} cannot reach {refused}, another executor: workers exchange gradients directly, which "
            "serverless compute does not allow; use a cluster whose executors reach one another, or num_workers=1."
        )

    def _load(self, host: str, program: bytes) -> str | None:
        try:
            cloudpickle.loads(program)
        except Exception as error:  # whatever user classes raise while they are unpickled
            return (
                f"host {host} cannot load {self.what} ({_kind(error)}): ship their modules with "
                "--py-files or install them there."
            )
        return None

    def _reach_driver(self, host: str) -> str | None:
        if self.driver is None:
            return None
        name, _, port = self.driver.rpartition(":")
        try:
            socket.create_connection((name.strip("[]"), int(port)), REACH_SECONDS).close()
        except OSError as error:
            return (
                f"host {host} cannot reach the driver at {self.driver} ({error}): let executors reach it there, or set "
                "advertise_address and driver_port to what they reach."
            )
        return None

    def _visit_store(self, host: str, name: str) -> str | None:
        if self.store is None:
            return None
        try:
            seen = self.store.read_bytes(f"{PROBES}/{self.token}/driver") == self.token.encode()
        except (ElasticError, OSError):
            seen = False
        if not seen:
            return (
                f"host {host} does not see what the driver wrote to the store {self.store.url}: "
                "choose a place that all machines share, such as s3://, hdfs:// or a network drive."
            )
        try:
            self.store.write_bytes(name, self.token.encode())
            if self.store.read_bytes(name) != self.token.encode():
                return f"host {host} reads something else than it wrote in the store {self.store.url}."
        except (ElasticError, OSError) as error:
            return f"host {host} cannot write to the store {self.store.url} ({_kind(error)}): give it the right to."
        return None


def task_of(probe: Probe, program: Broadcast[bytes] | Brought) -> Task:
    """The probe as a nested function, which travels by value, so that it starts even where our package is missing."""
    packed = pickle.dumps(probe)

    def run(numbers: Iterable[int]) -> Iterator[Any]:
        for number in list(numbers):  # consumed, so that Spark uses the Python worker again
            try:
                yield pickle.loads(packed).report(number, program.value)
            except ImportError as error:
                yield socket.gethostname(), str(error)

    return run


def preflight(
    sc: SparkContext,
    payload: bytes,
    store: Store | None,
    needs: tuple[str, ...],
    timeout: float,
    bind: Bind | None = None,
    what: str = Probe.what,
) -> list[dict[str, str]]:
    """Probe the live executors; returns the facts of each.

    payload: cloudpickle of what workers will load; what: it in words. timeout: seconds until some executor must have
    answered. bind: where the job's server will listen; None: whether hosts reach it is not looked at.

    Raises:
        PreflightError: a host cannot run the job, or none answered. StoreError: the driver cannot write the store.
    """
    program = sc.broadcast(payload)
    try:
        with probing(store, what, bind) as probe:
            tag = f"spark_elastic-preflight-{probe.token}"
            reports = _reach_all(sc, task_of(probe, program), tag, timeout)
            judge_all(reports, admit(facts(), needs), store)
    finally:
        program.unpersist()
    return list({report.executor: report.facts for report in reports}.values())


@contextmanager
def probing(store: Store | None, what: str, bind: Bind | None) -> Iterator[Probe]:
    """A probe whose store and driver are there to be found as long as the block runs.

    Raises:
        StoreError: the driver cannot write the store. InvalidInput: `bind` cannot be bound.
    """
    token = uuid.uuid4().hex
    if store is not None:
        store.write_bytes(f"{PROBES}/{token}/driver", token.encode())
    # Nobody need answer at this door: the kernel takes connections by itself.
    door = listen(bind) if bind is not None else None
    try:
        yield Probe(
            store, token, what, dialled(bind, door) if bind is not None and door is not None else None
        )
    finally:
        if door is not None:
            door.close()
        if store is not None:
            store.remove_tree(f"{PROBES}/{token}")


def _reach_all(sc: SparkContext, task: Task, tag: str, timeout: float) -> list[Report]:
    """Spark deals tasks out in turns, so that as many tasks as executors reach each that is idle."""
    reports: list[Report] = []
    for attempt in range(1, ROUNDS + 1):
        executors = _live_executors(sc)
        for answer in _run(sc, task, executors * attempt, tag, timeout):
            reports.append(genuine(answer))
        if len({report.executor for report in reports}) >= executors or any(
            r.fault or r.unreached for r in reports
        ):
            break
    return reports


def genuine(answer: Any) -> Report:
    """Raises PreflightError where a probe found no spark_elastic to load."""
    if isinstance(answer, Report):
        return answer
    host, reason = answer
    version = spark_elastic.__version__
    raise PreflightError(
        f"host {host} cannot load spark_elastic ({reason}), and the driver has {version}: install "
        f"spark_elastic {version} there, or send it along with ship=True."
    )


def _live_executors(sc: SparkContext) -> int:
    try:
        registered = len(sc._jsc.sc().statusTracker().getExecutorInfos())
    except (Py4JError, AttributeError):  # where users are denied that: as many as there are cores
        return sc.defaultParallelism
    return max(1, registered - 1)  # the driver is one of them


def judge_all(
    reports: list[Report],
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


def _run(sc: SparkContext, task: Task, tasks: int, tag: str, timeout: float) -> list[Any]:
    """One Spark job, cancelled when the time is over or the caller is interrupted."""
    answers: list[Any] = []
    errors: list[Exception] = []

    def work() -> None:
        sc.addJobTag(tag)
        try:
            answers.extend(sc.parallelize(range(tasks), tasks).mapPartitions(task).collect())
        except Exception as error:  # raised below, in the caller's thread
            errors.append(error)
        finally:
            sc.removeJobTag(tag)

    thread = InheritableThread(target=work, name="spark-elastic-preflight", daemon=True)
    thread.start()
    late = True
    try:
        thread.join(timeout)
        late = thread.is_alive()
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
        raise _explain(errors[0]) from errors[0]
    return answers


def _explain(error: Exception) -> Exception:
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


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
