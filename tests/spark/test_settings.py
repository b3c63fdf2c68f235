"""P8: whatever the user's Spark settings are, a job that loses an executor ends with the same result.

Settings that do not touch each other share a session, since each session costs half a minute.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_elastic.config import ElasticConfig
from spark_elastic.protocol.types import Limits
from tests.journals import keep_journal
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster, await_true
from tests.spark.fits import fit_through_a_loss
from tests.spark.stories import HeldProgram, ScenarioListener, are_ranks_in_order, is_sum_exact, launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
from tests.spark.session_settings import DYNAMIC, NARROW, SPECULATIVE

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(600)]
SparkWith = Callable[[Mapping[str, str]], "SparkSession"]


def find_busy(cluster: StandaloneCluster) -> list[int]:
    """The executors that train."""
    return [pid for pid in cluster.executor_pids() if cluster.training_children(pid)]


def run_and_lose_an_executor(
    spark: SparkSession, cluster: StandaloneCluster, fault: Fault, folder: Path, workers: int
) -> None:
    """A job that ends once its world is whole again after the loss."""

    def kill() -> None:
        fault(cluster.kill_executor, find_busy(cluster)[-1])

    program = HeldProgram(folder, fault.on)
    story = ScenarioListener((5, workers, kill), over=(program.over, workers))
    result = launch(spark, program, Limits(workers, 1, workers), story)
    assert is_sum_exact(result, program)
    assert are_ranks_in_order(result)
    assert workers - 1 in story.sizes[story.sizes.index(workers) :], "no executor was lost"
    assert story.sizes[-1] == workers


@pytest.mark.scenario("G14")
def test_p8_training_works_under_zero_failures_small_messages_and_no_worker_reuse(
    spark_with: SparkWith, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    """The model is larger than a message and a result may be."""
    fit_through_a_loss(spark_with(NARROW), standalone, fault, tmp_path, workers=3, numbers=1_300_000)


def test_r14_p8_a_job_survives_a_killed_slot_task_and_a_killed_executor_where_spark_bears_no_failure(
    spark_with: SparkWith, standalone: StandaloneCluster, tmp_path: Path
) -> None:
    spark, program = spark_with(NARROW), HeldProgram(tmp_path)

    def kill_slot_task() -> None:
        standalone.slot_tasks(find_busy(standalone)[0])[0].kill()

    def kill_executor() -> None:
        standalone.kill_executor(find_busy(standalone)[-1])

    story = ScenarioListener((5, 3, kill_slot_task), (10, 3, kill_executor), over=(program.over, 3))
    limits = Limits(3, 1, 3, gather_timeout=60.0)
    result = launch(spark, program, limits, story)
    assert story.told
    assert is_sum_exact(result, program)
    assert story.sizes[0] == 3
    assert story.sizes.count(3) >= 2
    assert min(story.sizes) < 3
    assert max(story.sizes) == 3  # Spark's own retry makes no fourth worker


def test_p8_training_works_under_speculation_exclusion_and_fair_pools(
    spark_with: SparkWith, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    """A core is free, so that Spark starts a second attempt of each slot task; it never makes a third worker (R14)."""
    spark = spark_with(SPECULATIVE)
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", "training")
    try:
        fit_through_a_loss(spark, standalone, fault, tmp_path, workers=2)
    finally:
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", None)


@pytest.mark.scenario("G15")
def test_a_decommissioned_executor_s_worker_leaves_in_time_and_no_step_is_lost(
    spark_with: SparkWith, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    spark, program = spark_with(SPECULATIVE), HeldProgram(tmp_path, fault.on)
    left: list[bool] = []

    def decommission() -> None:
        busy = find_busy(standalone)
        fault(os.kill, busy[-1], signal.SIGPWR)
        await_true(lambda: not standalone.training_children(busy[-1]), "the worker to leave")
        left.append(True)
        program.over.touch()

    story = ScenarioListener((5, 2, decommission))
    with keep_journal(ElasticConfig()) as (config, journal):
        result = launch(spark, program, Limits(2, 1, 2), story, config=config)
    assert left
    assert len(story.sizes) > 1, "nobody left"
    assert is_sum_exact(result, program)
    assert any("is being decommissioned" in line for line in journal)
    assert not [line for line in journal if '"AbortWorld"' in line], "a world broke (P3)"


@pytest.mark.scenario("G13")
def test_p8_training_works_under_dynamic_allocation(
    spark_with: SparkWith, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    """No executor is there at first: queued slots bring them."""
    spark = spark_with(DYNAMIC)
    run_and_lose_an_executor(spark, standalone, fault, tmp_path, workers=2)
