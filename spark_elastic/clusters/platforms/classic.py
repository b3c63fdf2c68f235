"""A session with a SparkContext, which the driver reaches through py4j."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_elastic.clusters.platforms.job_spec import JobSpec
from spark_elastic.clusters.platforms.spark_platform import MakeTask, SparkPlatform
from spark_elastic.clusters.spark.executors import ExecutorWatch
from spark_elastic.clusters.spark.host_facts import choose_bind
from spark_elastic.clusters.spark.launcher import SparkLauncher
from spark_elastic.clusters.spark.payload import Payload, broadcast, destroy
from spark_elastic.clusters.spark.preflight import preflight
from spark_elastic.clusters.spark.probe import ProbeSpec
from spark_elastic.clusters.spark.progress_bar import pause_progress_bar
from spark_elastic.clusters.spark.settings import CLASSIC_PYTHON
from spark_elastic.clusters.spark.shipping import ship
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.gang_scheduler import GangScheduler
from spark_elastic.driver.job import LaunchResult
from spark_elastic.driver.ports import Discovery
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.rendezvous.http_server import Bind
from spark_elastic.worker.program import pickle_for_workers

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile


class ClassicPlatform(SparkPlatform):
    """Programs travel as broadcasts, and the scheduler lists the executors."""

    python_settings = (CLASSIC_PYTHON,)

    @property
    def master(self) -> str:
        return str(self._get_application().master)

    def count_workers(self, asked: int | None) -> int:
        return self._get_application().defaultParallelism if asked is None else asked

    def launch(self, job: JobSpec, listener: JobListener | None = None) -> LaunchResult:
        with pause_progress_bar(self._get_application()):
            return super().launch(job, listener)

    def _read_settings(self) -> dict[str, str]:
        return dict(self._get_application().getConf().getAll())

    def _get_application(self) -> SparkContext:
        return self._spark.sparkContext

    def _choose_bind(self) -> Bind:
        return choose_bind(self._get_application().getConf(), self._config)

    def _probe(self, spec: ProbeSpec, number: int) -> list[dict[str, str]]:
        self._ship_package()
        return preflight(self._get_application(), spec, self._config.start_timeout, number)

    def _find_plaintext_server(self) -> None:
        return None

    @contextmanager
    def _ship(self, program: object) -> Iterator[Payload]:
        self._ship_package()
        shipped = broadcast(self._get_application(), pickle_for_workers(program), "the program")
        try:
            yield shipped
        finally:
            destroy(shipped)

    def _check_profile(self, profile: ResourceProfile) -> object:
        return self._get_application().emptyRDD().withResources(profile)

    def _make_launcher(self, make_task: MakeTask, profile: ResourceProfile | None) -> SparkLauncher:
        return SparkLauncher(self._get_application(), make_task, self._clock, profile)

    def _discover(self, scheduler: GangScheduler) -> Discovery:
        return CombinedDiscovery(ExecutorWatch(self._get_application(), self._clock), scheduler)

    def _ship_package(self) -> None:
        if self._config.ship:
            ship(self._get_application())
