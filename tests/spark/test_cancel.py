"""However a running job is cancelled, it ends within seconds and leaves nothing: no slot job, no process, no thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from spark_elastic.errors import JobCancelled
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fakes import CountingProgram
from tests.spark.cluster import StandaloneCluster, await_true
from tests.spark.stories import is_sum_exact, launch

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]

WITHIN = 5.0  # seconds


class Running(JobListener):
    """A listener that knows when training has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        self.begun.set()


def launch_for_ever(spark: SparkSession, listener: Running) -> None:
    program = CountingProgram(steps=1_000_000, seconds=0.02)
    launch(spark, program, Limits(2, 1, 2), listener)


def assert_nothing_is_left(spark: SparkSession, cluster: StandaloneCluster) -> None:
    tracker = spark.sparkContext.statusTracker()
    await_true(lambda: not tracker.getActiveJobsIds(), "no active slot job", WITHIN)
    await_true(lambda: not cluster.busy_executors(), "no training process", WITHIN)


def test_cancelling_its_job_group_ends_the_job(spark: SparkSession, spark_cluster: StandaloneCluster) -> None:
    sc, listener, group = spark.sparkContext, Running(), "the users own group"
    errors: list[BaseException] = []

    def run() -> None:
        sc.setJobGroup(group, "a job to cancel")
        try:
            launch_for_ever(spark, listener)
        except BaseException as error:  # handed to the test
            errors.append(error)

    thread = InheritableThread(target=run, daemon=True)
    thread.start()
    assert listener.begun.wait(200), "training did not begin"
    assert sc.statusTracker().getJobIdsForGroup(group), "slot jobs are not in the caller's job group"
    began = time.monotonic()
    sc.cancelJobGroup(group)
    thread.join(30)
    assert time.monotonic() - began < WITHIN
    assert isinstance(errors[0], JobCancelled)
    assert_nothing_is_left(spark, spark_cluster)
    program = CountingProgram(steps=3)
    assert is_sum_exact(launch(spark, program, Limits(2, 1, 2)), program), "another job works"


def test_an_interrupted_cell_ends_the_job(spark: SparkSession, spark_cluster: StandaloneCluster) -> None:
    """What a notebook or Ctrl-C does: SIGINT to the process, KeyboardInterrupt in the main thread."""
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
