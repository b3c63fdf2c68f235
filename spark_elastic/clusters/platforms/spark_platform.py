"""The steps of preflight and launch that sessions of both kinds share. Runs in the caller's thread."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.platforms.job_spec import JobSpec
from spark_elastic.clusters.spark.payload import Payload
from spark_elastic.clusters.spark.probe import ProbeSpec
from spark_elastic.clusters.spark.settings import (
    EXECUTOR_GPUS,
    check_settings,
    find_harmful_settings,
    is_ssl_enabled,
    make_slot_profile,
    read_executor_memory,
    warn_about_settings,
)
from spark_elastic.clusters.spark.slot_task import SlotTask
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.gang_scheduler import GangScheduler, get_job_queue
from spark_elastic.driver.job import DriverOptions, LaunchResult, check_driver_settings, supervise
from spark_elastic.driver.ports import Discovery, ThreadPerSlotLauncher
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.http_server import Bind

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

MakeTask = Callable[[SlotSpec], SlotTask]


class SparkPlatform(ABC):
    """Where a job runs: a session. Subclasses say what differs between the kinds of sessions."""

    def __init__(self, spark: SparkSession, config: ElasticConfig) -> None:
        self._spark = spark
        self._config = config
        self._clock = SystemClock()

    # ---- what differs

    # Prefixes of the settings for the Python processes in which slots run: the first that is set counts.
    python_settings: tuple[str, ...]

    @property
    @abstractmethod
    def master(self) -> str:
        """Spark's name of the cluster."""

    @abstractmethod
    def count_workers(self, asked: int | None) -> int:
        """How many workers are wanted at the start.

        Raises:
            InvalidInput: none were asked for, and their number cannot be looked up.
        """

    @abstractmethod
    def _read_settings(self) -> dict[str, str]:
        """Spark's settings, as far as the session can see them."""

    @abstractmethod
    def _get_application(self) -> object:
        """The object that the jobs of the application share: the SparkContext, or the session."""

    @abstractmethod
    def _choose_bind(self) -> Bind:
        """Where the driver's server listens."""

    @abstractmethod
    def _probe(self, spec: ProbeSpec, number: int) -> list[dict[str, str]]:
        """Run the preflight of a job with that number of workers; returns the facts of each executor."""

    @abstractmethod
    def _find_plaintext_server(self) -> str | None:
        """The host of a Spark Connect server to which the session speaks without TLS."""

    @abstractmethod
    def _ship(self, program: object) -> AbstractContextManager[Payload]:
        """The program as tasks receive it, as long as the block runs."""

    @abstractmethod
    def _check_profile(self, profile: ResourceProfile) -> object:
        """Make Spark accept a resource profile, or raise."""

    @abstractmethod
    def _make_launcher(self, make_task: MakeTask, profile: ResourceProfile | None) -> ThreadPerSlotLauncher:
        """A launcher over the session."""

    @abstractmethod
    def _discover(self, scheduler: GangScheduler) -> Discovery:
        """The discovery that posts changes of hosts, and of the gathering job, to the driver."""

    # ---- what is the same

    def check_settings(self) -> None:
        """
        Raises:
            InvalidInput: with these settings of Spark or of the driver no job works.
        """
        settings = self._read_settings()
        check_settings(settings, self.python_settings)
        check_driver_settings(self._config, is_ssl_enabled(settings))

    def list_warnings(self) -> list[str]:
        """Settings of the session that harm jobs without preventing them, in a sentence each."""
        return find_harmful_settings(self._read_settings(), self._find_plaintext_server())

    def preflight(
        self,
        payload: bytes,
        store: Store | None,
        needs: tuple[str, ...],
        number: int,
        what: str,
        imports: tuple[str, ...] = (),
    ) -> list[dict[str, str]]:
        """Check that hosts can run the job: see `spark.preflight`. Returns the facts of each executor.

        Args:
            payload: the pickled program; what: the same in words, for errors.
            number: of workers.
            imports: early imports of the program; the checks start the fork servers from which workers will come.
        """
        encrypted = auth.is_tls_enabled(self._config, is_ssl_enabled(self._read_settings()))
        spec = self._describe_hosts(needs)
        bind = self._choose_bind()
        slot = SlotSpec.from_config(self._config, address="", key=b"", attempt=0, imports=imports)
        spec = replace(
            spec, payload=payload, store=store, bind=bind, what=what, encrypted=encrypted, slot=slot
        )
        return self._probe(spec, number)

    def launch(self, job: JobSpec, listener: JobListener | None = None) -> LaunchResult:
        """Run the job to its end. Blocks.

        Raises:
            JobFailed, JobCancelled: as `launch.job.supervise`.
        """
        settings = self._read_settings()
        if not job.name:
            application = settings.get("spark.app.name", "fit")
            job = replace(job, name=f"{application}-{secrets.token_hex(2)}")
        warn_about_settings(settings, self._get_application(), self._find_plaintext_server())
        config = self._config
        memory = read_executor_memory(settings, config.device, config.slots_per_gpu)
        with self._ship(job.program) as program:
            profile = make_slot_profile(settings, self._check_profile, config.device, config.slots_per_gpu)
            launcher = self._make_launcher(
                lambda spec: SlotTask(job.complete(spec), program, memory), profile
            )
            scheduler = GangScheduler(
                get_job_queue(self._get_application()), job.name, job.limits, self._clock
            )
            with scheduler.alive_lock, scheduler:
                return self._drive(job, launcher, scheduler, settings, listener)

    def _drive(
        self,
        job: JobSpec,
        launcher: ThreadPerSlotLauncher,
        scheduler: GangScheduler,
        settings: Mapping[str, str],
        listener: JobListener | None,
    ) -> LaunchResult:
        """Drive the job from this process."""
        bind = self._choose_bind()
        options = DriverOptions(
            bind=bind.host,
            advertise=bind.advertise,
            encrypted=is_ssl_enabled(settings),
            check_host=self._describe_hosts(job.needs).make_host_check(),
            run=job.run,
            scheduler=scheduler,
        )
        discovery = self._discover(scheduler)
        return supervise(launcher, discovery, options, job.limits, self._config, job.name, listener)

    def _describe_hosts(self, needs: tuple[str, ...]) -> ProbeSpec:
        """What a job that uses these frameworks needs of its hosts."""
        assigned = int(self._read_settings().get(EXECUTOR_GPUS, "0")) > 0
        return ProbeSpec(b"", needs=needs, device=self._config.device, assigned=assigned)
