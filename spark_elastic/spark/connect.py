"""Slots over a session of Spark Connect: a `mapInArrow` job with one row for each, under a tag of the launch.

There is no SparkContext here: no broadcasts, so that the program is a file of the session; and no view of executors,
so that hosts are known by their slots' registrations alone. The driver stands beside the client. One thread per job.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pyarrow as pa
from pyspark import TaskContext
from pyspark.resource import ResourceProfile

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.gathering import Patience, application_of
from spark_elastic.driver.ports import Contact, Post
from spark_elastic.errors import InvalidInput, PreflightError
from spark_elastic.protocol.events import LaunchEnded
from spark_elastic.rendezvous.serving import Bind
from spark_elastic.spark.address import LOOPBACK, collect_host_facts, find_address_towards, find_own_address
from spark_elastic.spark.executors import EXECUTOR_GPUS, TASK_GPUS
from spark_elastic.spark.launcher import SlotEnd, classify, join_all
from spark_elastic.spark.payload import make_payload
from spark_elastic.spark.preflight import check_reports, make_version_check, require_report
from spark_elastic.spark.probe import ProbeSpec, make_probe_task, open_probe
from spark_elastic.spark.slot_task import SlotTask

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("spark_elastic.spark")

Body: TypeAlias = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

RETRIED = "Spark ran the coordinator's task again"
END_WAIT = 5.0  # seconds for a job that was interrupted
INTERRUPT_EVERY = 0.5  # seconds between two interrupts of what still runs at the end
DRIVER_HOST = "spark.driver.host"
SETTINGS = (
    "spark.master",
    DRIVER_HOST,
    "spark.task.cpus",
    EXECUTOR_GPUS,
    TASK_GPUS,
    "spark.executor.cores",
    "spark.executor.memory",
    "spark.executor.memoryOverhead",
    "spark.executor.memoryOverheadFactor",
    "spark.executor.pyspark.memory",
    "spark.executor.maxNumFailures",
    "spark.yarn.max.executor.failures",
    "spark.executor.failuresValidityInterval",
    "spark.yarn.executor.failuresValidityInterval",
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
    "spark.ssl.enabled",
)


def settings_of(spark: SparkSession) -> dict[str, str]:
    """The server's settings that a job looks at."""
    found = {name: _setting(spark, name) for name in SETTINGS}
    return {name: value for name, value in found.items() if value is not None}


def _setting(spark: SparkSession, name: str) -> str | None:
    try:
        return spark.conf.get(name, None)
    except Exception as error:  # of gRPC or py4j: some servers refuse to tell
        log.debug("%s is not told: %s", name, error)
        return None


def driver_host(spark: SparkSession) -> str | None:
    """The host of Spark's own driver, which executors reach."""
    return settings_of(spark).get(DRIVER_HOST)


def choose_bind(spark: SparkSession, config: ElasticConfig) -> Bind:
    """Where the driver listens: on this machine's address on the way to the server, unless the configuration says."""
    if hasattr(spark, "_jsparkSession"):  # a classic session, whose SparkContext is denied
        server = driver_host(spark) or LOOPBACK
    else:
        client: Any = spark.client
        server = client.host
    own = config.advertise_address or find_address_towards(server, 1)
    return Bind(config.bind_address or own, config.driver_port, own)


def plain_server(spark: SparkSession) -> str | None:
    """The server's host where the client speaks to it without TLS; None where it does not, or cannot say."""
    client: Any = None if hasattr(spark, "_jsparkSession") else spark.client
    secure = getattr(getattr(client, "_builder", None), "secure", True)  # no public name says so
    return None if secure else str(client.host)


def check_call(config: ElasticConfig, number: int | None) -> int:
    """The number of workers. Says what cannot work before any job.

    Raises:
        InvalidInput: with that.
    """
    if number is None:
        raise InvalidInput("over Spark Connect the number of workers cannot be looked up: give num_workers.")
    if config.ship:
        raise InvalidInput(
            "ship=True does not work over Spark Connect: install spark_elastic on the executors."
        )
    return number


def preflight(spark: SparkSession, spec: ProbeSpec, number: int, timeout: float) -> str | None:
    """As `preflight.preflight`, by as many probes as there will be workers; also whether they reach one another.

    timeout: seconds for all of them, while no other job of the application trains. Returns why executors cannot reach
    the client, None where they can.

    Raises:
        PreflightError: a host cannot run the job, or the time was over.
    """
    with open_probe(spec) as alone:
        probe = replace(alone, together=number, towards=driver_host(spark))
        task = make_probe_task(probe, make_payload(spark, spec.payload))

        def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for answer in task(batch.column(0).to_pylist()):
                    yield pa.RecordBatch.from_pydict({"answer": [pickle.dumps(answer)]})

        frame = _frame(spark, number).mapInArrow(body, "answer binary")
        rows = _collected(spark, frame, f"spark_elastic-preflight-{probe.token}", timeout)
        reports = [require_report(pickle.loads(bytes(row["answer"]))) for row in rows]
        check_reports(
            reports, make_version_check(collect_host_facts(), spec.needs), spec.store, reached=False
        )
    unreached = next((report.unreached for report in reports if report.unreached is not None), None)
    if unreached is not None and spec.store is None:
        raise PreflightError(
            f"{unreached.removesuffix('.')}; or give a store, and the driver runs in a task."
        )
    return unreached


class DriverTask(Protocol):
    """A job's driver, as the body of a task."""

    def run_driver(self, host: str) -> None:
        """host: this machine's address, as others know it."""
        ...

    def wait_standby(self) -> None:
        """Return once nobody conducts."""
        ...


class ConnectLauncher:
    """`driver.ports.Launcher` over a session of Spark Connect. make_task, profile: as for `SparkLauncher`."""

    def __init__(
        self,
        spark: SparkSession,
        make_task: Callable[[Contact], SlotTask],
        clock: Clock,
        profile: ResourceProfile | None = None,
    ) -> None:
        self._spark = spark
        self._slots = {} if profile is None else {"profile": profile}  # an argument that Spark 3.5 has not
        self._make_task = make_task
        self._clock = clock
        self._tag = f"spark_elastic-{secrets.token_hex(8)}"
        self._closing = threading.Event()
        self._carriers: list[threading.Thread] = []
        self._carry: Callable[[int], None] | None = None

    def start(self, contact: Contact, post: Post) -> None:
        task = self._make_task(contact)

        def carry(job: int) -> None:
            if self._closing.is_set():
                return
            end = self._run(task, job)
            if not self._closing.is_set():
                post(LaunchEnded(self._clock.now(), job, *end))

        self._carry = carry

    def launch(self, job: int) -> None:
        assert self._carry is not None
        carrier = threading.Thread(target=self._carry, args=(job,), name=f"slot job {job}", daemon=True)
        self._carriers.append(carrier)
        carrier.start()

    def close(self, timeout: float) -> list[str]:
        """Slots were released by message before; what still runs is interrupted at Spark."""
        deadline = self._clock.now() + timeout
        self._closing.set()
        join_all(self._carriers, self._clock, min(deadline, self._clock.now() + timeout / 3))
        # More than once: a job that was just being submitted is not interrupted by the first.
        while self._alive() and self._clock.now() < deadline:
            _interrupt(self._spark, self._tag)
            join_all(self._carriers, self._clock, min(deadline, self._clock.now() + INTERRUPT_EVERY))
        return [carrier.name for carrier in self._alive()]

    def _alive(self) -> list[threading.Thread]:
        return [carrier for carrier in self._carriers if carrier.is_alive()]

    def run_coordinator(self, coordinator: DriverTask) -> str:
        """Run a coordinator in a task, and see that to its end. Returns how it ended. Blocks."""
        towards = driver_host(self._spark)

        def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                said = _conducted(coordinator, towards)
                yield pa.RecordBatch.from_pydict({"ended": [said] * batch.num_rows})

        self._carriers.append(threading.current_thread())
        return self._collect(body).reason

    def _run(self, task: SlotTask, job: int) -> SlotEnd:
        def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield pa.RecordBatch.from_pydict({"ended": list(task([job] * batch.num_rows))})

        return self._collect(body, **self._slots)

    def _collect(self, body: Body, **arguments: Any) -> SlotEnd:
        """Run one task. Returns how it ended, in its own words or in Spark's."""
        try:
            self._spark.addTag(self._tag)  # of this thread's jobs alone
            rows = _frame(self._spark, 1).mapInArrow(body, "ended string", **arguments).collect()
            return SlotEnd(str(rows[0]["ended"]) if rows else "the task returned nothing")
        except Exception as error:  # Spark's many ways to fail a job; which one decides about a new launch
            return classify(str(error))


def _conducted(coordinator: DriverTask, towards: str | None) -> str:
    """How the coordinator ended. Spark's retry returns without a new one, and so does its speculative copy: but only
    once the first is gone, since Spark kills that as soon as the copy has returned."""
    context = TaskContext.get()
    if context is None or context.attemptNumber() == 0:
        coordinator.run_driver(find_own_address(towards))
        return "it has ended"
    coordinator.wait_standby()
    return RETRIED


def _collected(spark: SparkSession, frame: Any, tag: str, timeout: float) -> list[Any]:
    """A job's rows; interrupted when the time is over or the caller is."""
    rows: list[Any] = []
    errors: list[Exception] = []

    def work() -> None:
        spark.addTag(tag)
        try:
            rows.extend(frame.collect())
        except Exception as error:  # raised below, in the caller's thread
            errors.append(error)

    patience = Patience(application_of(spark), timeout, SystemClock(), "the preflight of a job")
    thread = threading.Thread(target=work, name="spark-elastic-preflight", daemon=True)
    thread.start()
    try:
        patience.join(thread)
    finally:
        if late := thread.is_alive():
            _interrupt(spark, tag)
            thread.join(END_WAIT)
    if errors and not late:
        raise errors[0]
    if not rows:
        raise PreflightError(
            f"no executor took a probe within {timeout:.0f} s: see whether the cluster has free cores, or raise "
            "start_timeout."
        )
    return rows


def _interrupt(spark: SparkSession, tag: str) -> None:
    try:
        spark.interruptTag(tag)
    except Exception as error:  # of gRPC or of Spark: the session is gone, and its jobs with it
        log.debug("nothing left to interrupt: %s", error)


def _frame(spark: SparkSession, rows: int) -> Any:
    """One row in each partition."""
    return spark.range(0, rows, 1, rows)
