"""A session of Spark Connect, which has no SparkContext: slots and probes are `mapInArrow` jobs, one thread each.

Without broadcasts, a large program is a file of the session. Without a list of executors, the driver learns of hosts
from the registrations of their slots. The driver runs beside the client. If executors cannot reach the client, it runs
in a task, as a coordinator, and exchanges messages with the client through the store.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from spark_elastic.clock import Clock, RunningClock
from spark_elastic.clusters import coordinator
from spark_elastic.clusters.spark import settings as conf
from spark_elastic.clusters.spark.host_facts import LOOPBACK, find_own_address
from spark_elastic.clusters.spark.payload import Payload, make_payload, make_program_payload
from spark_elastic.clusters.spark.platform import JobSpec, MakeTask, SparkPlatform
from spark_elastic.clusters.spark.preflight import await_probes, check_reports, require_report
from spark_elastic.clusters.spark.probe import Probe
from spark_elastic.clusters.spark.slot_task import classify_error
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.gang_scheduler import GangScheduler, get_job_queue
from spark_elastic.driver.job import FIRST_ATTEMPT, LaunchResult
from spark_elastic.driver.ports import Discovery, ThreadPerSlotLauncher
from spark_elastic.errors import InvalidInput, PreflightError
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.monitoring.logs import announce_phase
from spark_elastic.protocol.types import SlotOutcome, SlotSpec
from spark_elastic.rendezvous.addresses import find_address_towards

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

log = logging.getLogger("spark_elastic.spark")

RETRIED = "Spark ran the coordinator's task again"


class ConnectPlatform(SparkPlatform):
    """Programs travel in the plan of a job or as files of the session."""

    python_settings = (conf.CONNECT_PYTHON, conf.CLASSIC_PYTHON)

    def __init__(self, spark: SparkSession, config: ElasticConfig) -> None:
        super().__init__(config, spark, read_settings(spark))
        self._spark = spark
        self._coordinator_store: Store | None = None  # for its messages; None: the driver runs in the client

    def count_workers(self, asked: int | None) -> int:
        over = "over Spark Connect"
        if asked is None:
            raise InvalidInput(f"{over} the number of workers cannot be looked up: give num_workers.")
        if self._config.ship:
            raise InvalidInput(f"ship=True does not work {over}: install spark_elastic on the executors.")
        return asked

    def _find_address(self) -> str:
        """On the way to the server, or to Spark's driver if the session does not say where that is."""
        driver_host = self._settings.get(conf.DRIVER_HOST)
        if _is_classic(self._spark):  # its SparkContext is denied
            return find_address_towards(driver_host or LOOPBACK, 1)
        server = _find_server(self._spark)
        return find_address_towards(server, 1) if server else find_own_address(driver_host)

    def _probe(self, probe: Probe, number: int) -> list[dict[str, str]]:
        self.count_workers(number)
        probe = replace(probe, peers=number, reachable_host=self._settings.get(conf.DRIVER_HOST))
        facts, unreached = preflight(self._spark, probe, self._config.start_timeout)
        if unreached is not None:
            coordinator.check_config(self._config)
            log.warning("the coordinator will run in a task: %s", unreached)
            self._coordinator_store = probe.store
        return facts

    def _find_plaintext_server(self) -> str | None:
        client: Any = None if _is_classic(self._spark) else self._spark.client
        secure = getattr(getattr(client, "_builder", None), "secure", True)  # no public name says so
        return None if secure else _find_server(self._spark)

    @contextmanager
    def _ship(self, program: object) -> Iterator[Payload]:
        yield make_program_payload(self._spark, program)

    def _check_profile(self, profile: ResourceProfile) -> object:
        return profile.id

    def _make_launcher(self, make_task: MakeTask, profile: ResourceProfile | None) -> ConnectLauncher:
        return ConnectLauncher(self._spark, make_task, self._clock, profile)

    def _discover(self, scheduler: GangScheduler) -> Discovery:
        return scheduler  # the session does not tell which executors there are

    def _drive(
        self, job: JobSpec, launcher: ThreadPerSlotLauncher, scheduler: GangScheduler, listener: JobListener
    ) -> LaunchResult:
        store, run, config = self._coordinator_store, job.run, self._config
        if store is None:
            return super()._drive(job, launcher, scheduler, listener)
        assert isinstance(launcher, ConnectLauncher)
        folder, key = f"channels/{uuid.uuid4().hex}", secrets.token_bytes(32)
        own, other = coordinator.CLIENT, coordinator.COORDINATOR
        task = coordinator.Coordinator(
            coordinator.ChannelEnd(store, folder, key, other, own),
            job.limits,
            coordinator.check_config(config),
            job.name,
            conf.is_ssl_enabled(self._settings),
            self._make_probe(job.needs).make_host_check(),
            run,
        )
        attempt = FIRST_ATTEMPT if run is None else run.attempt
        commit_key = run.load_commit_key() if run is not None and config.keep_commits else None
        # The coordinator's address and certificate follow.
        known = {"key": key, "attempt": attempt, "job_name": job.name, "commit_key": commit_key}
        spec = SlotSpec.from_config(config, address="", **known)
        end, clock = coordinator.ChannelEnd(store, folder, key, own, other), RunningClock(self._clock)
        client = coordinator.CoordinatorClient(end, spec, launcher, scheduler, listener, clock)
        try:
            towards = self._settings.get(conf.DRIVER_HOST)
            return client.follow(lambda: launcher.run_coordinator(task, towards), config)
        finally:
            store.discard(folder)


def read_settings(spark: SparkSession) -> dict[str, str]:
    """The server's settings that a job looks at."""
    settings = {}
    for name in conf.LOOKED_AT:
        try:
            value = spark.conf.get(name, None)
        except Exception as error:  # of gRPC or py4j: some servers refuse
            log.debug("the setting %s cannot be read: %s", name, error)
        else:
            if value is not None:
                settings[name] = value
    return settings


def _is_classic(spark: SparkSession) -> bool:
    """Asks the session itself for nothing: platforms may refuse even that."""
    return "_jsparkSession" in vars(spark)


def _find_server(spark: SparkSession) -> str | None:
    """The host that the client's channel leads to; None if the channel does not say, as those of some platforms."""
    try:
        client: Any = spark.client
        return str(client.host) or None
    except Exception as error:  # of the platform's channel builder; pyspark's own base class raises, too
        log.debug("the channel names no host: %s", error)
        return None


def preflight(spark: SparkSession, spec: Probe, timeout: float) -> tuple[list[dict[str, str]], str | None]:
    """As `classic.preflight`, with as many probes as workers, which also check whether they reach one another. Returns
    the facts of each executor, and why executors cannot reach the client, or None."""
    with spec.open() as probe:
        task = probe.make_task(make_payload(spark, spec.payload))

        def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for answer in task(batch.column(0).to_pylist()):
                    yield pa.RecordBatch.from_pydict({"answer": [pickle.dumps(answer)]})

        announce_phase(f"checking hosts with {spec.peers} probes")
        tag = f"spark_elastic-preflight-{probe.token}"

        def collect() -> list[Any]:
            spark.addTag(tag)
            return list(_make_frame(spark, spec.peers).mapInArrow(body, "answer binary").collect())

        rows = await_probes(collect, lambda: _interrupt(spark, tag), get_job_queue(spark), timeout)
        reports = [require_report(pickle.loads(bytes(row["answer"]))) for row in rows]
        facts = check_reports(probe, reports, reached=False)
    unreached = next((report.unreached for report in reports if report.unreached is not None), None)
    if unreached is not None and spec.store is None:
        advice = "or give a store, and the driver runs in a task."
        raise PreflightError(f"{unreached.removesuffix('.')}; {advice}")
    return facts, unreached


class ConnectLauncher(ThreadPerSlotLauncher):
    """`driver.ports.Launcher` over a session of Spark Connect: jobs under a tag of the launcher."""

    def __init__(
        self, spark: SparkSession, make_task: MakeTask, clock: Clock, profile: ResourceProfile | None = None
    ) -> None:
        """The arguments are those of `classic.SparkLauncher`."""
        super().__init__(clock)
        self._spark = spark
        self._slot_arguments = {} if profile is None else {"profile": profile}  # Spark 3.5 lacks it
        self._make_task = make_task
        self._tag = f"spark_elastic-{secrets.token_hex(8)}"

    def cancel(self) -> None:
        _interrupt(self._spark, self._tag)

    def run_slot(self, launch: int) -> SlotOutcome:
        task = self._make_task(self.spec)
        return self._run_task(lambda: next(task([launch])), **self._slot_arguments)

    def run_coordinator(self, task: coordinator.Coordinator, towards: str | None) -> str:
        """Run a coordinator in a task. Blocks; returns how it ended. towards: a host that all executors reach."""
        self._threads.append(threading.current_thread())  # `close` interrupts its job, too, and waits for it
        return self._run_task(lambda: _run_coordinator_task(task, towards)).reason

    def _run_task(self, work: Callable[[], str], **arguments: Any) -> SlotOutcome:
        """Run one task. Returns how it ended, in its own words or in Spark's."""

        def body(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield pa.RecordBatch.from_pydict({"ended": [work()] * batch.num_rows})

        try:
            self._spark.addTag(self._tag)  # of this thread's jobs alone
            rows = _make_frame(self._spark, 1).mapInArrow(body, "ended string", **arguments).collect()
            return SlotOutcome(str(rows[0]["ended"]) if rows else "the task returned nothing")
        except Exception as error:  # Spark has many ways to fail a job; the kind decides about a new launch
            return classify_error(str(error))


def _run_coordinator_task(task: coordinator.Coordinator, towards: str | None) -> str:
    """Run the coordinator in the task's first attempt. Returns how it ended. A later attempt (a retry of Spark's, or a
    speculative copy) only waits for its end: Spark kills the first as soon as another returns."""
    context = TaskContext.get()
    if context is None or context.attemptNumber() == 0:
        task.run_driver(find_own_address(towards))
        return "it has ended"
    task.wait_standby()
    return RETRIED


def _interrupt(spark: SparkSession, tag: str) -> None:
    try:
        spark.interruptTag(tag)
    except Exception as error:  # of gRPC or of Spark: the session is gone, and its jobs with it
        log.debug("nothing left to interrupt: %s", error)


def _make_frame(spark: SparkSession, rows: int) -> Any:
    """A DataFrame with one row in each partition."""
    return spark.range(0, rows, 1, rows)
