"""Horovod's scenarios on Spark, on a real cluster: hosts come and go, workers fail, in one job each.

The program counts in closed form, so that its result shows each step that was lost, doubled or torn.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

import cloudpickle
import numpy as np
import pytest
from pyspark.sql import SparkSession

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import FailureBudgetExceeded, NotEnoughWorkers, WorkerFailed
from spark_elastic.protocol.types import Limits
from tests.journals import keep_journal
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster, Worker, await_true
from tests.spark.stories import HeldProgram, ScenarioListener, are_ranks_in_order, is_sum_exact, launch

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors have no tests folder

NEVER_AGAIN = (float("inf"), float("inf"))
WHOLE = 60.0  # seconds that the first world may take to become whole


class RaisingProgram(HeldProgram):
    """Raises, where a file `order.RANK` or `order.all` says so; each exception is another one."""

    def _share(self, step: int, rank: int, size: int) -> np.ndarray:
        if (self.folder / "order.all").exists():
            raise RuntimeError(f"ordered of all, {uuid.uuid4().hex}")
        order = self.folder / f"order.{rank}"
        if order.exists():
            order.unlink()
            raise RuntimeError(f"ordered of rank {rank}, {uuid.uuid4().hex}")
        return super()._share(step, rank, size)


def give_order(fault: Fault, folder: Path, ranks: int | str) -> Callable[[], object]:
    return lambda: fault((folder / f"order.{ranks}").touch)


def executors(spark: SparkSession) -> list[str]:
    backend = spark.sparkContext._jsc.sc().schedulerBackend()
    ids = backend.getExecutorIds()
    return sorted(str(ids.apply(i)) for i in range(ids.size()))


def all_executors(spark: SparkSession, count: int = 3) -> list[str]:
    await_true(lambda: len(executors(spark)) == count, f"{count} executors")
    return executors(spark)


@pytest.mark.scenario("S2", "S8", "S9")
def test_hosts_are_added_and_removed(spark: SparkSession, tmp_path: Path, fault: Fault) -> None:
    """1 to 3 hosts and back, then one for another; the first leads as long as it is there."""
    a, b, c = all_executors(spark)
    listed: dict[str, int] = {a: 1}

    def list_only(*hosts: str) -> Callable[[], None]:
        def act() -> None:
            listed.update(dict.fromkeys(hosts, 1))
            for gone in set(listed) - set(hosts):
                del listed[gone]

        return lambda: fault(act)

    program = HeldProgram(tmp_path, fault.on)
    story = ScenarioListener(
        (5, 1, list_only(a, b)), (10, 2, list_only(a, b, c)), (15, 3, list_only(a, b)),
        (20, 2, list_only(b, c)), (25, 2, list_only(c, a)), (30, 2, list_only(a)), over=(program.over, 1),
    )  # fmt: skip
    # Hosts that come back find a spare, as in a job that lasts.
    config = ElasticConfig(host_discovery=lambda: dict(listed), gather_timeout=1.0, spare_after=0.0)
    with keep_journal(config) as (config, journal):
        result = launch(spark, program, Limits(1, 1, 3, gather_timeout=1.0), story, config=config)
    assert story.told
    assert story.sizes[:4] == [1, 2, 3, 2]
    assert story.sizes[-1] == 1
    assert set(story.sizes[4:-1]) <= {1, 2, 3}, "one for another: at most one more or less in between"
    assert is_sum_exact(result, program)
    assert not [line for line in journal if '"AbortWorld"' in line], "a planned change broke a world (P3)"


@pytest.mark.scenario("S3")
def test_hosts_beyond_max_workers_come_and_go_without_a_reset(
    spark: SparkSession, standalone: StandaloneCluster, tmp_path: Path, fault: Fault
) -> None:
    all_executors(spark)
    program, ended = HeldProgram(tmp_path, fault.on), Event()
    brought: list[Worker] = []

    def lose_one_and_bring_one() -> None:
        busy = standalone.training_children
        idle = [w for w in standalone.workers if not any(map(busy, children(standalone, w)))]
        standalone.kill_worker(idle[0])
        all_executors(spark, 2)
        brought.append(standalone.start_worker())
        all_executors(spark, 3)
        program.over.touch()
        ended.wait(120.0)  # a worker dies with the thread that started it

    story = ScenarioListener((5, 2, lambda: fault(lose_one_and_bring_one)))
    limits = Limits(2, 1, 2, gather_timeout=WHOLE)
    try:
        result = launch(spark, program, limits, story)
    finally:
        for worker in brought:
            standalone.kill_worker(worker)
        ended.set()
    assert brought, "no host was idle, or none came in time"
    assert story.sizes == [2]
    assert is_sum_exact(result, program)


def children(cluster: StandaloneCluster, worker: Worker) -> list[int]:
    """The executors of a host."""
    import psutil

    own = {child.pid for child in psutil.Process(worker.pid).children()}
    return [pid for pid in cluster.executor_pids() if pid in own]


@pytest.mark.scenario("S4", "S6", "S11", "S13")
def test_failing_workers_return_after_a_cooldown(spark: SparkSession, tmp_path: Path, fault: Fault) -> None:
    """Three failures, of ranks 1, 0 and 1: more than spark.task.maxFailures would bear of one task in Horovod's way."""
    all_executors(spark)

    order, program = partial(give_order, fault, tmp_path), RaisingProgram(tmp_path, fault.on)
    story = ScenarioListener((5, 3, order(1)), (10, 3, order(0)), (15, 3, order(1)), over=(program.over, 3))
    limits = Limits(3, 1, 3, gather_timeout=WHOLE, cooldown_range=(1.0, 1.0))
    result = launch(spark, program, limits, story, spare_after=0.0)  # these crash in their first seconds
    assert story.told
    assert story.sizes.count(2) >= 3
    assert story.sizes[-1] == 3
    assert are_ranks_in_order(result)
    assert is_sum_exact(result, program)


@pytest.mark.scenario("S5", "S10", "S12")
def test_failing_slots_never_return_until_no_capacity_is_left_and_the_job_ends_with_the_reason(
    spark: SparkSession, tmp_path: Path, fault: Fault
) -> None:
    """The exclusion is this project's own: no slot task fails at Spark, so `spark.excludeOnFailure` excludes none."""
    all_executors(spark)
    order, program = partial(give_order, fault, tmp_path), RaisingProgram(tmp_path, fault.on)
    story = ScenarioListener((5, 3, order(0)), (10, 2, order(1)))
    limits = Limits(3, 2, 3, start_timeout=12.0, gather_timeout=WHOLE, cooldown_range=NEVER_AGAIN)
    with pytest.raises(NotEnoughWorkers, match="1 workers came within 12 s and 2 are needed"):
        launch(spark, program, limits, story)
    assert story.sizes == [3, 2]


@pytest.mark.scenario("S7")
def test_an_exception_of_all_ranks_ends_the_job(spark: SparkSession, tmp_path: Path, fault: Fault) -> None:
    all_executors(spark)
    story = ScenarioListener((5, 3, give_order(fault, tmp_path, "all")))
    limits = Limits(3, 1, 3, gather_timeout=WHOLE)
    with pytest.raises((WorkerFailed, FailureBudgetExceeded), match="ordered of all"):
        launch(spark, RaisingProgram(tmp_path, fault.on), limits, story)


@pytest.mark.scenario("S14")
def test_more_failures_than_the_budget_allows_end_the_job_at_once(
    spark: SparkSession, tmp_path: Path, fault: Fault
) -> None:
    all_executors(spark)
    order = partial(give_order, fault, tmp_path)
    story = ScenarioListener((5, 3, order(2)), (10, None, order(1)))
    limits = Limits(3, 1, 3, gather_timeout=WHOLE, failure_budget=1, cooldown_range=(0.2, 0.4))
    with pytest.raises(FailureBudgetExceeded, match=r"workers failed 2 times .*\(failure_budget\)"):
        launch(spark, RaisingProgram(tmp_path, fault.on), limits, story)
