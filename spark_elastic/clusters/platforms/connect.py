"""A session without a SparkContext: slots are jobs of the session.

The driver runs beside the client. If executors cannot reach the client, it runs in a task, as a coordinator, and
exchanges messages with the client through the store.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_elastic.clusters import coordinator
from spark_elastic.clusters.platforms.job_spec import JobSpec
from spark_elastic.clusters.platforms.spark_platform import MakeTask, SparkPlatform
from spark_elastic.clusters.spark import connect
from spark_elastic.clusters.spark.payload import Payload, make_program_payload
from spark_elastic.clusters.spark.probe import ProbeSpec
from spark_elastic.clusters.spark.settings import CLASSIC_PYTHON, CONNECT_PYTHON, is_ssl_enabled
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.gang_scheduler import GangScheduler
from spark_elastic.driver.job import FIRST_ATTEMPT, LaunchResult
from spark_elastic.driver.ports import Discovery, ThreadPerSlotLauncher
from spark_elastic.errors import StoreError
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.rendezvous.http_server import Bind
from spark_elastic.runs.store_channel import ChannelEnd

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

log = logging.getLogger("spark_elastic")


class ConnectPlatform(SparkPlatform):
    """Programs travel in the plan of a job or as files of the session."""

    python_settings = (CONNECT_PYTHON, CLASSIC_PYTHON)

    def __init__(self, spark: SparkSession, config: ElasticConfig) -> None:
        super().__init__(spark, config)
        self._coordinator_store: Store | None = (
            None  # None: executors reach the client, where the driver runs
        )

    @property
    def master(self) -> str:
        return self._read_settings().get("spark.master", "a server of Spark Connect")

    def count_workers(self, asked: int | None) -> int:
        return connect.check_call(self._config, asked)

    def _read_settings(self) -> dict[str, str]:
        return connect.read_settings(self._spark)

    def _get_application(self) -> SparkSession:
        return self._spark

    def _choose_bind(self) -> Bind:
        return connect.choose_bind(self._spark, self._config)

    def _probe(self, spec: ProbeSpec, number: int) -> list[dict[str, str]]:
        connect.check_call(self._config, number)
        facts, unreached = connect.preflight(self._spark, spec, number, self._config.start_timeout)
        if unreached is not None:
            coordinator.check_config(self._config)
            log.warning("the coordinator will run in a task: %s", unreached)
            self._coordinator_store = spec.store
        return facts

    def _find_plaintext_server(self) -> str | None:
        return connect.find_plaintext_server(self._spark)

    @contextmanager
    def _ship(self, program: object) -> Iterator[Payload]:
        yield make_program_payload(self._spark, program)

    def _check_profile(self, profile: ResourceProfile) -> object:
        return profile.id

    def _make_launcher(self, make_task: MakeTask, profile: ResourceProfile | None) -> connect.ConnectLauncher:
        return connect.ConnectLauncher(self._spark, make_task, self._clock, profile)

    def _discover(self, scheduler: GangScheduler) -> Discovery:
        return scheduler  # the session does not tell which executors there are

    def _drive(
        self,
        job: JobSpec,
        launcher: ThreadPerSlotLauncher,
        scheduler: GangScheduler,
        settings: Mapping[str, str],
        listener: JobListener | None,
    ) -> LaunchResult:
        store, run = self._coordinator_store, job.run
        if store is None:
            return super()._drive(job, launcher, scheduler, settings, listener)
        assert isinstance(launcher, connect.ConnectLauncher)
        folder, key = f"channels/{uuid.uuid4().hex}", secrets.token_bytes(32)
        own, other = coordinator.CLIENT, coordinator.COORDINATOR
        task = coordinator.Coordinator(
            ChannelEnd(store, folder, key, other, own),
            job.limits,
            coordinator.check_config(self._config),
            job.name,
            is_ssl_enabled(settings),
            self._describe_hosts(job.needs).make_host_check(),
            None if run is None else (run.run_id, run.attempt, run.checkpoints),
        )
        attempt = FIRST_ATTEMPT if run is None else run.attempt
        # The coordinator's address and certificate follow.
        commit_key = run.load_commit_key() if run is not None and self._config.keep_commits else None
        spec = SlotSpec.from_config(
            self._config, address="", key=key, attempt=attempt, job_name=job.name, commit_key=commit_key
        )
        client = coordinator.CoordinatorClient(
            ChannelEnd(store, folder, key, own, other),
            spec,
            launcher,
            scheduler,
            listener or JobListener(),
            self._clock,
        )
        try:
            return client.follow(lambda: launcher.run_coordinator(task), self._config)
        finally:
            try:
                store.remove_tree(folder)
            except StoreError as error:  # the job's result or error counts more
                log.warning("%s Remove it by hand.", error)
