"""However a running job is cancelled, it ends within seconds and leaves nothing: no slot job, no process, no thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from pyspark import InheritableThread

from spark_elastic.errors import JobCancelled
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fakes import CountingProgram
from tests.spark.cluster import StandaloneCluster, await_line, await_true, cluster_environment
from tests.spark.stories import launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]

WITHIN = 5.0  # seconds
GROUP = "the users own group"


class Running(JobListener):
    """A listener that knows when training has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        self.begun.set()


class Job:
    """A launch that would take for ever, in a thread of its own with the job group GROUP."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.error: BaseException | None = None
        self.ended_at = 0.0
        self._running = Running()
        self._thread = InheritableThread(target=self._run, daemon=True)
        self._thread.start()
        assert self._running.begun.wait(200), "training did not begin"

    def time_cancel(self, cancel: Callable[[], object]) -> float:
        """Seconds from the cancel to the end of `launch`."""
        began = time.monotonic()
        cancel()
        self._thread.join(30)
        assert not self._thread.is_alive(), "launch did not return"
        return self.ended_at - began

    def _run(self) -> None:
        try:
            self._spark.sparkContext.setJobGroup(GROUP, "a job to cancel")
            launch_for_ever(self._spark, self._running)
        except BaseException as error:  # handed to the test
            self.error = error
        self.ended_at = time.monotonic()


def launch_for_ever(spark: SparkSession, listener: Running) -> None:
    program = CountingProgram(steps=1_000_000, seconds=0.02)
    launch(spark, program, Limits(2, 1, 2), listener)


def assert_nothing_is_left(spark: SparkSession, cluster: StandaloneCluster) -> None:
    tracker = spark.sparkContext.statusTracker()
    await_true(lambda: not tracker.getActiveJobsIds(), "no active slot job", WITHIN)
    await_true(lambda: not children(cluster), "no training process", WITHIN)


def children(cluster: StandaloneCluster) -> list[psutil.Process]:
    """Training processes of the whole cluster."""
    return [child for executor in cluster.executor_pids() for child in cluster.training_children(executor)]


def assert_a_new_launch_works(spark: SparkSession) -> None:
    program = CountingProgram(steps=3)
    result = launch(spark, program, Limits(2, 1, 2))
    assert result.results
    assert f'"sum": {program.expected_sum()}' in result.results[0]


def test_cancelling_its_job_group_ends_the_job(spark: SparkSession, spark_cluster: StandaloneCluster) -> None:
    sc = spark.sparkContext
    job = Job(spark)
    assert sc.statusTracker().getJobIdsForGroup(GROUP), "slot jobs are not in the caller's job group"
    taken = job.time_cancel(lambda: sc.cancelJobGroup(GROUP))
    assert isinstance(job.error, JobCancelled)
    assert taken < WITHIN
    assert_nothing_is_left(spark, spark_cluster)
    assert_a_new_launch_works(spark)


def test_an_interrupted_cell_ends_the_job(spark: SparkSession, spark_cluster: StandaloneCluster) -> None:
    """What a notebook does: SIGINT to the process, KeyboardInterrupt in the main thread."""
    listener = Running()

    def interrupt() -> None:
        if listener.begun.wait(200):
            os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        launch_for_ever(spark, listener)
    helper.join()
    assert_nothing_is_left(spark, spark_cluster)


SCRIPT = """
    from pyspark.sql import SparkSession
    from tests.spark.test_cancel import Running, launch_for_ever

    class Loud(Running):
        def on_progress(self, metrics):
            if not self.begun.is_set():
                print("training", flush=True)
            super().on_progress(metrics)

    spark = SparkSession.builder.master("{url}").config("spark.executor.memory", "512m").getOrCreate()
    try:
        launch_for_ever(spark, Loud())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_driver_and_all_of_its_processes(
    free_cluster: StandaloneCluster, tmp_path: Path
) -> None:
    log = tmp_path / "driver.log"
    with log.open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT).format(url=free_cluster.url)],
            stdout=output,
            stderr=output,
            env=os.environ | cluster_environment(free_cluster.scratch),
        )
    try:
        await_line(log, "(training)", driver)
        began = time.monotonic()
        driver.send_signal(signal.SIGINT)
        await_line(log, "(interrupted)", driver)
        assert time.monotonic() - began < WITHIN
        driver.wait(60)
    finally:
        driver.kill()
        driver.wait()
    await_true(lambda: not children(free_cluster), "no training process", WITHIN)
