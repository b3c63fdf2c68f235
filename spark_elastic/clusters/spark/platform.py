"""Launches a job over a Spark session: the steps of preflight and launch that sessions of both kinds share.

`classic` and `connect` say what differs. Runs in the caller's thread.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.spark import settings as conf
from spark_elastic.clusters.spark.payload import Payload
from spark_elastic.clusters.spark.probe import Probe
from spark_elastic.clusters.spark.slot_task import SlotTask
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.gang_scheduler import GangScheduler, get_job_queue
from spark_elastic.driver.job import DriverOptions, LaunchResult, check_driver_settings, supervise
from spark_elastic.driver.ports import Discovery, ThreadPerSlotLauncher
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits, SlotSpec
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.addresses import Bind
from spark_elastic.runs.checkpoint import OwnedRun
from spark_elastic.worker.imports import find_packages, list_early_imports

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

MakeTask = Callable[[SlotSpec], SlotTask]


@dataclass(frozen=True)
class JobSpec:
    """A job to launch. Values only."""

    program: object  # a `worker.program.Program`
    limits: Limits  # numbers of workers, times and budgets
    name: str  # as people see it; "": the application's name and four hex digits
    preload: tuple[str, ...] = ()  # modules that a process must be able to import before it is warm
    run: OwnedRun | None = None  # the run to which the job's checkpoints belong; None: no checkpoints
    modules: tuple[str, ...] = ()  # modules that loading the program imports, as early imports

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages that hosts must have."""
        return find_packages(self.imports)

    @property
    def imports(self) -> tuple[str, ...]:
        """The early imports of the job's processes."""
        return list_early_imports(self.program, (*self.preload, *self.modules))


class SparkPlatform(ABC):
    """Where a job runs: a session."""

    python_settings: tuple[str, ...]  # prefixes of settings for slots' Python; the first that is set counts

    def __init__(self, config: ElasticConfig, application: Any, settings: Mapping[str, str]) -> None:
        """application: the SparkContext or session, which its jobs share. settings: Spark's, as far as known."""
        self._config, self._application, self._settings = config, application, settings
        self._clock = SystemClock()

    # ---- what differs between the kinds of sessions

    @abstractmethod
    def count_workers(self, asked: int | None) -> int:
        """How many workers are wanted at the start. Raises InvalidInput: it cannot be looked up."""

    @abstractmethod
    def _find_address(self) -> str:
        """This machine's address, as executors reach it."""

    @abstractmethod
    def _probe(self, probe: Probe, number: int) -> list[dict[str, str]]:
        """Run the preflight of a job with that number of workers; returns the facts of each executor."""

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

    def _find_plaintext_server(self) -> str | None:
        """The host of a Spark Connect server to which the session speaks without TLS."""
        return None

    # ---- what is the same

    @property
    def master(self) -> str:
        """Spark's name of the cluster."""
        return self._settings.get("spark.master", "a server of Spark Connect")

    def check_settings(self) -> None:
        """Raises InvalidInput: with these settings of Spark or of the driver no job works."""
        conf.check_settings(self._settings, self.python_settings)
        check_driver_settings(self._config, conf.is_ssl_enabled(self._settings))

    def list_warnings(self) -> list[str]:
        """Settings of the session that harm jobs without preventing them, in a sentence each."""
        return conf.find_harmful_settings(self._settings, self._find_plaintext_server())

    def preflight(
        self,
        payload: bytes,
        store: Store | None,
        needs: tuple[str, ...],
        number: int,
        what: str,
        imports: tuple[str, ...] = (),
    ) -> list[dict[str, str]]:
        """Check that hosts can run the job: see `probe`. Returns the facts of each executor. payload: the pickled
        program; what: the same in words. imports: early ones of the program; the checks start the fork servers that
        workers come from."""
        probe = replace(
            self._make_probe(needs),
            payload=payload,
            store=store,
            bind=self._choose_bind(),
            what=what,
            encrypted=auth.is_tls_enabled(self._config, conf.is_ssl_enabled(self._settings)),
            slot=SlotSpec.from_config(self._config, address="", key=b"", attempt=0, imports=imports),
        )
        return self._probe(probe, number)

    def launch(self, job: JobSpec, listener: JobListener | None = None) -> LaunchResult:
        """Run the job to its end. Blocks. Raises JobFailed, JobCancelled: as `driver.job.supervise`."""
        settings, config = self._settings, self._config
        if not job.name:
            job = replace(job, name=f"{settings.get('spark.app.name', 'fit')}-{secrets.token_hex(2)}")
        conf.warn_about_settings(settings, self._application, self._find_plaintext_server())
        gpus = config.device, config.slots_per_gpu
        memory = conf.read_executor_memory(settings, *gpus)
        with self._ship(job.program) as program:

            def make_task(spec: SlotSpec) -> SlotTask:
                return SlotTask(replace(spec, preload=job.preload, imports=job.imports), program, memory)

            profile = conf.make_slot_profile(settings, self._check_profile, *gpus)
            launcher = self._make_launcher(make_task, profile)
            queue = get_job_queue(self._application)
            scheduler = GangScheduler(queue, job.name, job.limits, self._clock)
            with scheduler.alive_lock, scheduler:
                return self._drive(job, launcher, scheduler, listener or JobListener())

    def _drive(
        self, job: JobSpec, launcher: ThreadPerSlotLauncher, scheduler: GangScheduler, listener: JobListener
    ) -> LaunchResult:
        """Drive the job from this process."""
        bind = self._choose_bind()
        options = DriverOptions(
            bind=bind.host,
            advertise=bind.advertise,
            encrypted=conf.is_ssl_enabled(self._settings),
            check_host=self._make_probe(job.needs).make_host_check(),
            run=job.run,
            scheduler=scheduler,
        )
        discovery = self._discover(scheduler)
        return supervise(launcher, discovery, options, job.limits, self._config, job.name, listener)

    def _choose_bind(self) -> Bind:
        """Where the driver listens: as the job's configuration says, else where executors reach this machine."""
        own = self._config.advertise_address or self._find_address()
        host = self._config.bind_address or self._settings.get("spark.driver.bindAddress")
        return Bind(host or own, self._config.driver_port, own)

    def _make_probe(self, needs: tuple[str, ...]) -> Probe:
        """What a job that uses these frameworks needs of its hosts."""
        assigned = int(self._settings.get(conf.EXECUTOR_GPUS, "0")) > 0
        return Probe(needs=needs, device=self._config.device, assigned=assigned)
