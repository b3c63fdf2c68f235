"""Slots and probes over a session of Spark Connect: `mapInArrow` jobs, one thread each, under a tag of the launch.

Such a session has no SparkContext. Without broadcasts, a large program is a file of the session. Without a list of
executors, the driver learns of hosts from the registrations of their slots.
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

from spark_elastic.clock import Clock
from spark_elastic.clusters.spark.host_facts import LOOPBACK, find_own_address
from spark_elastic.clusters.spark.payload import make_payload
from spark_elastic.clusters.spark.probe import (
    ProbeSpec,
    await_probes,
    check_reports,
    make_probe_task,
    open_probe,
    require_report,
)
from spark_elastic.clusters.spark.settings import (
    CLASSIC_PYTHON,
    CONNECT_PYTHON,
    EXECUTOR_GPUS,
    IDLE_KILL,
    IDLE_TIMEOUT,
    TASK_GPUS,
)
from spark_elastic.clusters.spark.slot_task import SlotTask, classify_error
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.gang_scheduler import get_job_queue
from spark_elastic.driver.ports import Post, SlotOutcome, ThreadPerSlotLauncher
from spark_elastic.errors import InvalidInput, PreflightError
from spark_elastic.monitoring.log_forwarding import announce_phase
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.rendezvous.addresses import find_address_towards
from spark_elastic.rendezvous.http_server import Bind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("spark_elastic.spark")

Body: TypeAlias = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

RETRIED = "Spark ran the coordinator's task again"
DRIVER_HOST = "spark.driver.host"
SETTINGS = (
    "spark.app.name",
    "spark.master",
    DRIVER_HOST,
    "spark.task.cpus",
    EXECUTOR_GPUS,
    TASK_GPUS,
    "spark.executor.cores",
    "spark.executor.memory",
    "spark.executor.memoryOverhead",
    "spark.executor.memoryOverheadFactor",
    "spark.kubernetes.memoryOverheadFactor",
    "spark.executor.pyspark.memory",
    "spark.executor.maxNumFailures",
    "spark.yarn.max.executor.failures",
    "spark.executor.failuresValidityInterval",
    "spark.yarn.executor.failuresValidityInterval",
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
    "spark.ssl.enabled",
    *(prefix + name for prefix in (CONNECT_PYTHON, CLASSIC_PYTHON) for name in (IDLE_KILL, IDLE_TIMEOUT)),
)


def read_settings(spark: SparkSession) -> dict[str, str]:
    """The server's settings that a job looks at."""
    found = {name: _setting(spark, name) for name in SETTINGS}
    return {name: value for name, value in found.items() if value is not None}


def _setting(spark: SparkSession, name: str) -> str | None:
    try:
        return spark.conf.get(name, None)
    except Exception as error:  # of gRPC or py4j: some servers refuse
        log.debug("the setting %s cannot be read: %s", name, error)
        return None


def driver_host(spark: SparkSession) -> str | None:
    """The host of Spark's own driver, which executors reach."""
    return read_settings(spark).get(DRIVER_HOST)


def choose_bind(spark: SparkSession, config: ElasticConfig) -> Bind:
    """Where the driver listens: as the configuration says, else on this machine's address on the way to the server."""
    own = config.advertise_address or _find_client_address(spark)
    return Bind(config.bind_address or own, config.driver_port, own)


def _is_classic(spark: SparkSession) -> bool:
    """Asks the session itself for nothing: platforms may refuse even that."""
    return "_jsparkSession" in vars(spark)


def _find_client_address(spark: SparkSession) -> str:
    if _is_classic(spark):  # its SparkContext is denied
        return find_address_towards(driver_host(spark) or LOOPBACK, 1)
    server = _find_server(spark)
    return find_address_towards(server, 1) if server else find_own_address(driver_host(spark))


def _find_server(spark: SparkSession) -> str | None:
    """The host that the client's channel leads to; None if the channel does not say, as those of some platforms."""
    try:
        client: Any = spark.client
        return str(client.host) or None
    except Exception as error:  # of the platform's channel builder; pyspark's own base class raises, too
        log.debug("the channel names no host: %s", error)
        return None


def find_plaintext_server(spark: SparkSession) -> str | None:
    """The server's host if the client speaks to it without TLS; None if not, or if that is unknown."""
    client: Any = None if _is_classic(spark) else spark.client
    secure = getattr(getattr(client, "_builder", None), "secure", True)  # no public name says so
    return None if secure else _find_server(spark)


def check_call(config: ElasticConfig, number: int | None) -> int:
    """Check a call before any job is launched. Returns the number of workers.

    Raises:
        InvalidInput: it cannot work over Spark Connect.
    """
    if number is None:
        raise InvalidInput("over Spark Connect the number of workers cannot be looked up: give num_workers.")
    if config.ship:
        raise InvalidInput(
            "ship=True does not work over Spark Connect: install spark_elastic on the executors."
        )
    return number


def preflight(
    spark: SparkSession, spec: ProbeSpec, number: int, timeout: float
) -> tuple[list[dict[str, str]], str | None]:
    """As `preflight.preflight`, with as many probes as workers, which also check whether they reach one another.

    Returns the facts of each executor, and why executors cannot reach the client, or None.

    Args:
        timeout: seconds for all probes; they do not count while another job of the application trains.

    Raises:
        PreflightError: a host cannot run the job, or the time was over.
    """
    with open_probe(spec) as alone:
        probe = replace(alone, peers=number, reachable_host=driver_host(spark))
        task = make_probe_task(probe, make_payload(spark, spec.payload))

        def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for answer in task(batch.column(0).to_pylist()):
                    yield pa.RecordBatch.from_pydict({"answer": [pickle.dumps(answer)]})

        announce_phase(f"checking hosts with {number} probes")
        tag = f"spark_elastic-preflight-{probe.token}"

        def collect() -> list[Any]:
            spark.addTag(tag)
            return list(_make_frame(spark, number).mapInArrow(body, "answer binary").collect())

        rows = await_probes(collect, lambda: _interrupt(spark, tag), get_job_queue(spark), timeout)
        reports = [require_report(pickle.loads(bytes(row["answer"]))) for row in rows]
        check_reports(reports, spec.make_host_check(), spec.store, reached=False)
    unreached = next((report.unreached for report in reports if report.unreached is not None), None)
    if unreached is not None and spec.store is None:
        raise PreflightError(
            f"{unreached.removesuffix('.')}; or give a store, and the driver runs in a task."
        )
    return list({report.executor: report.facts for report in reports}.values()), unreached


class DriverTask(Protocol):
    """The driver of a job, as the body of a task."""

    def run_driver(self, host: str) -> None:
        """Drive the job to its end. host: the address of this machine, as other machines know it."""
        ...

    def wait_standby(self) -> None:
        """Return once no other attempt of the task drives the job."""
        ...


class ConnectLauncher(ThreadPerSlotLauncher):
    """`driver.ports.Launcher` over a session of Spark Connect. Its arguments are those of `SparkLauncher`."""

    def __init__(
        self,
        spark: SparkSession,
        make_task: Callable[[SlotSpec], SlotTask],
        clock: Clock,
        profile: ResourceProfile | None = None,
    ) -> None:
        super().__init__(clock)
        self._spark = spark
        # Spark 3.5 has no such argument.
        self._slot_arguments = {} if profile is None else {"profile": profile}
        self._make_task = make_task
        self._task: SlotTask | None = None
        self._tag = f"spark_elastic-{secrets.token_hex(8)}"

    def start(self, spec: SlotSpec, post: Post) -> None:
        super().start(spec, post)
        self._task = self._make_task(spec)

    def cancel(self) -> None:
        _interrupt(self._spark, self._tag)

    def run_slot(self, launch: int) -> SlotOutcome:
        task = self._task

        def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            assert task is not None
            for batch in batches:
                yield pa.RecordBatch.from_pydict({"ended": list(task([launch] * batch.num_rows))})

        return self._run_task(body, **self._slot_arguments)

    def run_coordinator(self, coordinator: DriverTask) -> str:
        """Run a coordinator in a task, and wait for its end. Returns how it ended."""
        towards = driver_host(self._spark)

        def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                reason = _run_coordinator_task(coordinator, towards)
                yield pa.RecordBatch.from_pydict({"ended": [reason] * batch.num_rows})

        self._threads.append(threading.current_thread())  # `close` interrupts its job, too, and waits for it
        return self._run_task(body).reason

    def _run_task(self, body: Body, **arguments: Any) -> SlotOutcome:
        """Run one task. Returns how it ended, in its own words or in Spark's."""
        try:
            self._spark.addTag(self._tag)  # of this thread's jobs alone
            rows = _make_frame(self._spark, 1).mapInArrow(body, "ended string", **arguments).collect()
            return SlotOutcome(str(rows[0]["ended"]) if rows else "the task returned nothing")
        except Exception as error:  # Spark has many ways to fail a job; the kind decides about a new launch
            return classify_error(str(error))


def _run_coordinator_task(coordinator: DriverTask, towards: str | None) -> str:
    """Run the coordinator in the task's first attempt. Returns how it ended.

    A later attempt (a retry of Spark's, or a speculative copy) starts no coordinator. It returns only when the first is
    gone: Spark kills the first attempt as soon as another returns.
    """
    context = TaskContext.get()
    if context is None or context.attemptNumber() == 0:
        coordinator.run_driver(find_own_address(towards))
        return "it has ended"
    coordinator.wait_standby()
    return RETRIED


def _interrupt(spark: SparkSession, tag: str) -> None:
    try:
        spark.interruptTag(tag)
    except Exception as error:  # of gRPC or of Spark: the session is gone, and its jobs with it
        log.debug("nothing left to interrupt: %s", error)


def _make_frame(spark: SparkSession, rows: int) -> Any:
    """A DataFrame with one row in each partition."""
    return spark.range(0, rows, 1, rows)
