"""What a job needs of a Spark session, of the classic kind or of Spark Connect: `platform_of(session, config)`.

Owns which launcher, preflight and address belong to which kind. Runs in the caller's thread.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import cloudpickle

from spark_elastic import coordinator
from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.discovery import Together
from spark_elastic.driver.gathering import GatherTurn, application_of
from spark_elastic.errors import CoordinatorLost
from spark_elastic.launch.job import FIRST_ATTEMPT, DriverOptions, LaunchResult, supervise
from spark_elastic.launch.job_monitor import JobListener, NullListener
from spark_elastic.protocol.slot_spec import SlotSpec
from spark_elastic.protocol.types import Limits
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.serving import Bind
from spark_elastic.state.run_lease import RunLease
from spark_elastic.state.store_channel import ChannelEnd
from spark_elastic.worker.forking import select_fork_imports

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_elastic.spark.connect import ConnectLauncher
    from spark_elastic.spark.payload import Payload
    from spark_elastic.spark.settings import ExecutorMemory
    from spark_elastic.spark.slot_task import SlotTask

T = TypeVar("T")

log = logging.getLogger("spark_elastic")

MOST_IDLE = 3  # coordinators lost in a row without a new checkpoint


@dataclass(frozen=True)
class JobSpec:
    """What is to be launched. program: a `worker.program.Program`. needs: packages that hosts must have.

    preload: modules that a warm spare has imported. run: what its checkpoints belong to; None: none.
    """

    program: object
    limits: Limits
    name: str
    preload: tuple[str, ...] = ()
    run: RunLease | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(name for name in self.preload if "." not in name)

    def complete(self, spec: SlotSpec) -> SlotSpec:
        """The slots' description with what the program says."""
        imports = select_fork_imports(self.program, self.preload, spec.fork_workers)
        return replace(spec, preload=self.preload, imports=imports)


class Platform(Protocol):
    """Where a job runs."""

    @property
    def master(self) -> str:
        """Spark's name of the cluster."""
        ...

    def workers(self, asked: int | None) -> int:
        """How many are wanted at the start. Raises InvalidInput where that cannot be looked up."""
        ...

    def preflight(
        self, payload: bytes, store: Store | None, needs: tuple[str, ...], number: int, what: str
    ) -> None:
        """See that hosts can run the job: `spark.preflight`. number: of workers."""
        ...

    def launch(self, order: JobSpec, narrate: JobListener | None = None) -> LaunchResult:
        """Raises JobFailed, with its subclasses, and JobCancelled."""
        ...


def make_platform(spark: SparkSession, config: ElasticConfig) -> Platform:
    """That of a session."""
    from spark_elastic.spark.session import has_context

    return Classic(spark, config) if has_context(spark) else Connect(spark, config)


@dataclass(frozen=True)
class Classic:
    """A session with a SparkContext."""

    spark: SparkSession
    config: ElasticConfig

    @property
    def master(self) -> str:
        return str(self.spark.sparkContext.master)

    def workers(self, asked: int | None) -> int:
        return self.spark.sparkContext.defaultParallelism if asked is None else asked

    def preflight(
        self, payload: bytes, store: Store | None, needs: tuple[str, ...], number: int, what: str
    ) -> None:
        from spark_elastic.spark.preflight import preflight
        from spark_elastic.spark.probe import ProbeSpec
        from spark_elastic.spark.session import choose_bind
        from spark_elastic.spark.settings import is_ssl_enabled
        from spark_elastic.spark.shipping import ship

        sc = self.spark.sparkContext
        if self.config.ship:
            ship(sc)
        conf = sc.getConf()
        encrypted = auth.wanted(self.config, is_ssl_enabled(dict(conf.getAll())))
        spec = ProbeSpec(payload, store, needs, choose_bind(conf, self.config), what, encrypted)
        preflight(sc, spec, self.config.start_timeout)

    def launch(self, order: JobSpec, narrate: JobListener | None = None) -> LaunchResult:
        from spark_elastic.spark.executors import ExecutorWatch
        from spark_elastic.spark.launcher import SparkLauncher
        from spark_elastic.spark.payload import broadcast
        from spark_elastic.spark.session import choose_bind
        from spark_elastic.spark.settings import make_slot_profile, read_executor_memory, warn_about_settings
        from spark_elastic.spark.shipping import ship

        sc, config, clock = self.spark.sparkContext, self.config, SystemClock()
        settings = dict(sc.getConf().getAll())
        warn_about_settings(settings, sc)
        room = read_executor_memory(settings)
        if config.ship:
            ship(sc)
        shipped = broadcast(sc, cloudpickle.dumps(order.program), "the program")

        profile = make_slot_profile(settings, sc.emptyRDD().withResources)
        make_task = _make_tasks(order, shipped, room)
        launcher = SparkLauncher(sc, make_task, clock, profile)
        try:
            turn = GatherTurn(application_of(sc), order.name, order.limits, clock)
            with turn.lives, turn:
                watch = Together(ExecutorWatch(sc, clock), turn)
                site = _site(choose_bind(sc.getConf(), config), order, settings, turn)
                return supervise(launcher, watch, site, order.limits, config, order.name, narrate)
        finally:
            _destroy_broadcast(shipped)


class Connect:
    """A session without a SparkContext: slots as jobs of the session.

    The driver stands beside the client; where executors cannot reach that, in a task, and then letters in the store
    take its place here.
    """

    def __init__(self, spark: SparkSession, config: ElasticConfig) -> None:
        self._spark = spark
        self._config = config
        self._post_office: Store | None = None

    @property
    def master(self) -> str:
        from spark_elastic.spark import connect

        return connect.read_settings(self._spark).get("spark.master", "a server of Spark Connect")

    def workers(self, asked: int | None) -> int:
        from spark_elastic.spark import connect

        return connect.check_call(self._config, asked)

    def preflight(
        self, payload: bytes, store: Store | None, needs: tuple[str, ...], number: int, what: str
    ) -> None:
        from spark_elastic.spark import connect
        from spark_elastic.spark.probe import ProbeSpec
        from spark_elastic.spark.settings import is_ssl_enabled

        connect.check_call(self._config, number)
        place = connect.choose_bind(self._spark, self._config)
        encrypted = auth.wanted(self._config, is_ssl_enabled(connect.read_settings(self._spark)))
        spec = ProbeSpec(payload, store, needs, place, what, encrypted)
        unreached = connect.preflight(self._spark, spec, number, self._config.start_timeout)
        if unreached is not None:
            coordinator.check_config(self._config)
            log.warning("the coordinator will run in a task: %s", unreached)
            self._post_office = store

    def launch(self, order: JobSpec, narrate: JobListener | None = None) -> LaunchResult:
        from spark_elastic.spark import connect
        from spark_elastic.spark.payload import make_program_payload
        from spark_elastic.spark.settings import make_slot_profile, read_executor_memory, warn_about_settings

        config, clock = self._config, SystemClock()
        settings = connect.read_settings(self._spark)
        warn_about_settings(settings, self._spark, connect.find_plaintext_server(self._spark))
        program, room = make_program_payload(self._spark, order.program), read_executor_memory(settings)

        make_task = _make_tasks(order, program, room)
        profile = make_slot_profile(settings, lambda profile: profile.id)
        launcher = connect.ConnectLauncher(self._spark, make_task, clock, profile)
        turn = GatherTurn(application_of(self._spark), order.name, order.limits, clock)
        with turn.lives, turn:
            if self._post_office is None:
                site = _site(connect.choose_bind(self._spark, config), order, settings, turn)
                return supervise(launcher, turn, site, order.limits, config, order.name, narrate)
            return self._by_mail(order, launcher, turn, narrate or NullListener(), self._post_office)

    def _by_mail(
        self,
        order: JobSpec,
        launcher: ConnectLauncher,
        turn: GatherTurn,
        narrate: JobListener,
        store: Store,
    ) -> LaunchResult:
        from spark_elastic.spark import connect
        from spark_elastic.spark.probe import make_version_check
        from spark_elastic.spark.session import collect_host_facts
        from spark_elastic.spark.settings import is_ssl_enabled

        folder, key, run = f"mail/{uuid.uuid4().hex}", secrets.token_bytes(32), order.run
        own, other = coordinator.CLIENT, coordinator.COORDINATOR
        task = coordinator.Coordinator(
            ChannelEnd(store, folder, key, other, own),
            order.limits,
            coordinator.check_config(self._config),
            order.name,
            is_ssl_enabled(connect.read_settings(self._spark)),
            make_version_check(collect_host_facts(), order.needs),
            None if run is None else (run.run_id, run.attempt, run.checkpoints),
        )
        client = coordinator.CoordinatorClient(
            ChannelEnd(store, folder, key, own, other), order.name, launcher, turn, narrate, SystemClock()
        )
        try:
            attempt = FIRST_ATTEMPT if run is None else run.attempt
            return client.follow(lambda: launcher.run_coordinator(task), attempt, self._config)
        finally:
            store.remove_tree(folder)


def _site(bind: Bind, order: JobSpec, settings: Mapping[str, str], turn: GatherTurn) -> DriverOptions:
    """The driver's side of a job over a session; its server listens at `bind`."""
    from spark_elastic.spark.probe import make_version_check
    from spark_elastic.spark.session import collect_host_facts
    from spark_elastic.spark.settings import is_ssl_enabled

    return DriverOptions(
        bind=bind.host,
        advertise=bind.advertise,
        encrypted=is_ssl_enabled(settings),
        admit=make_version_check(collect_host_facts(), order.needs),
        run=order.run,
        gathered=turn.gathered,
        lacks=turn.lacks,
    )


def _make_tasks(job: JobSpec, program: Payload, memory: ExecutorMemory) -> Callable[[SlotSpec], SlotTask]:
    """What a launcher ships, once the driver listens."""
    from spark_elastic.spark.slot_task import SlotTask

    return lambda spec: SlotTask(job.complete(spec), program, memory)


def _destroy_broadcast(shipped: Any) -> None:
    try:
        shipped.destroy()
    except Exception as error:  # a stopped SparkContext has dropped its broadcasts already
        log.debug("broadcast not destroyed: %s", error)


def resume_after_coordinator_loss(attempt: Callable[[], T], kept: Callable[[], object]) -> T:
    """`attempt()`, and again as long as coordinators are lost that have come further, or not many in a row.

    kept: what the run would go on from.

    Raises:
        CoordinatorLost: that of the last one.
    """
    before, idle = kept(), 0
    while True:
        try:
            return attempt()
        except CoordinatorLost as error:
            after = kept()
            before, idle = after, 0 if after != before else idle + 1
            if idle >= MOST_IDLE:
                raise
            log.warning("%s; the run goes on from its newest checkpoint", error)
