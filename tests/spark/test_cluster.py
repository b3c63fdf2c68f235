"""The cluster that the other tests stand on: it starts, loses executors and hosts, and ends whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.spark.cluster import StandaloneCluster, await_true

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def _pid(_: object) -> list[int]:
    return [os.getpid()]


def test_executors_run_this_interpreter_and_import_both_packages(spark: SparkSession) -> None:
    def versions(_: object) -> list[tuple[str, str]]:
        import sys

        import spark_elastic

        return [(sys.executable, spark_elastic.__version__)]

    import sys

    import spark_elastic

    found = spark.sparkContext.parallelize(range(3), 3).mapPartitions(versions).collect()
    assert set(found) == {(sys.executable, spark_elastic.__version__)}


def test_killed_executor_is_replaced(spark: SparkSession, standalone: StandaloneCluster) -> None:
    before = set(standalone.executor_pids())
    victim = min(before)
    standalone.kill_executor(victim)
    await_true(lambda: len(set(standalone.executor_pids()) - {victim}) == 3, "a new executor")
    assert before - {victim} < set(standalone.executor_pids())
    with pytest.raises(ValueError, match="no executor of this cluster"):
        standalone.kill_executor(victim)


def test_lost_host_comes_back_after_the_test(spark: SparkSession, standalone: StandaloneCluster) -> None:
    lost = standalone.workers[0]
    standalone.kill_worker(lost)
    assert not psutil.pid_exists(lost.pid)
    assert len(standalone.executor_pids()) == 2


def test_slot_task_is_found_among_the_processes_of_its_executor(
    spark: SparkSession, standalone: StandaloneCluster
) -> None:
    assert len(standalone.workers) == 3
    pids = spark.sparkContext.parallelize(range(3), 3).mapPartitions(_pid).collect()
    tasks = {task.pid for executor in standalone.executor_pids() for task in standalone.slot_tasks(executor)}
    assert set(pids) & tasks


@pytest.mark.faults  # the tests of settings depend on it in each build; two cold sessions for its own sake are too dear
def test_other_settings_make_another_session(spark_with: Callable[[Mapping[str, str]], SparkSession]) -> None:
    session = spark_with({"spark.task.maxFailures": "1"})
    assert session.conf.get("spark.task.maxFailures") == "1"
    assert session.range(10).count() == 10


@pytest.mark.faults
def test_default_settings_come_back(spark: SparkSession) -> None:
    assert spark.conf.get("spark.task.maxFailures", "unset") == "unset"
