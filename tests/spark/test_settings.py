"""P8: whatever the user's Spark settings are, a job that loses an executor ends with the same result.

Settings that do not touch each other share a session, since each session costs half a minute.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from pyspark.sql import SparkSession

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.protocol.types import Limits
from tests.journals import keep_journal
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster, await_true
from tests.spark.conftest import SparkWith
from tests.spark.estimators import ROWS, Net, estimator, table
from tests.spark.fits import fit_through_a_loss
from tests.spark.stories import HeldProgram, ScenarioListener, are_ranks_in_order, is_sum_exact, launch

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(900)]

NARROW = {
    "spark.task.maxFailures": "1",
    "spark.driver.maxResultSize": "1m",
    "spark.rpc.message.maxSize": "1",
    "spark.python.worker.reuse": "false",
    "spark.executorEnv.http_proxy": "http://127.0.0.1:9",
    "spark.executorEnv.https_proxy": "http://127.0.0.1:9",
}
SPECULATIVE = {
    "spark.speculation": "true",
    "spark.speculation.interval": "200ms",
    "spark.speculation.task.duration.threshold": "1s",
    "spark.scheduler.mode": "FAIR",
    "spark.decommission.enabled": "true",
    "spark.excludeOnFailure.enabled": "true",  # with maxFailures=1 Spark itself refuses it
}
DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "3",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
}


@pytest.mark.scenario("G14")
def test_r14_p8_training_works_under_zero_failures_small_messages_and_no_worker_reuse(
    spark_with: SparkWith, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    """A slot task is killed, and then an executor; Spark's own retry makes no fourth worker. The model is larger than a
    message and a result may be."""

    def kill_slot_task() -> None:
        fault(standalone.slot_tasks(standalone.busy_executors()[0])[0].kill)

    how: Any = {"again": True, "first": [kill_slot_task], "numbers": 1_300_000}
    _, model = fit_through_a_loss(spark_with(NARROW), standalone, fault, tmp_path, workers=3, **how)
    assert [world.size for world in model.summary.worlds].count(3) >= 3, "it was not whole after each loss"


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
        busy = standalone.busy_executors()
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
    """No executor is there at first: queued slots bring them. It ends once the world is whole again after the loss."""
    program = HeldProgram(tmp_path, fault.on)

    def kill() -> None:
        fault(standalone.kill_executor, standalone.busy_executors()[-1])

    story = ScenarioListener((5, 2, kill), over=(program.over, 2))
    result = launch(spark_with(DYNAMIC), program, Limits(2, 1, 2), story)
    assert is_sum_exact(result, program)
    assert are_ranks_in_order(result)
    assert 1 in story.sizes[story.sizes.index(2) :], "no executor was lost"
    assert story.sizes[-1] == 2


# ---- fits, the long way

SPAN = {
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.shuffleTracking.timeout": "5s",  # the default keeps an executor for what it shuffled
    # One task writes the rows: Spark must not grow for those of a slow machine before the fit asks for slots.
    "spark.default.parallelism": "1",
    "spark.sql.shuffle.partitions": "1",
}


def count_executors(spark: SparkSession) -> int:
    """Without the driver, which is in the list too."""
    return len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1


@pytest.mark.faults
def test_p8_a_fit_makes_dynamic_allocation_grow_and_releases_its_executors(
    spark_with: SparkWith, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    """It begins on the one executor that is there; afterwards only that many are left, and a second fit grows anew."""
    spark = spark_with(DYNAMIC | SPAN)
    for number in range(2):
        await_true(lambda: count_executors(spark) == 1, "the executors to be given back", 180)
        place = tmp_path / str(number)
        _, model = fit_through_a_loss(spark, standalone, fault, place, 3, True, gather_timeout=0.1)
        assert model.summary.worlds[0].size == 1


@pytest.mark.faults
def test_p8_a_fit_works_with_two_cores_per_task(
    spark_with: SparkWith, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    for _ in range(2):
        standalone.start_worker(cores=2)
    spark = spark_with({"spark.task.cpus": "2", "spark.executor.cores": "2"})
    fit_through_a_loss(spark, standalone, fault, tmp_path, 2, again=True)


class LargeNet(Net):
    """So many more numbers to train."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.rand(numbers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.ballast.mean().double()


@pytest.mark.faults
def test_p8_a_fit_works_with_a_model_above_every_message_limit(
    spark_with: SparkWith, spark_cluster: StandaloneCluster, tmp_path: Path
) -> None:
    """It goes to the workers, comes back trained, and goes to those that predict. Above the heap it is refused."""
    for name in (__name__, Net.__module__):
        cloudpickle.register_pickle_by_value(sys.modules[name])
    df = table(spark_with(NARROW))

    def fit(net: LargeNet) -> ElasticTorchModel:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        how = {"epochs": 2, "num_workers": 2, "batch_size": ROWS // 2}
        return estimator(tmp_path, model=net, optimizer=optimizer, **how).fit(df)

    net = LargeNet(10_000_000)
    fitted = fit(net)
    module = fitted.model
    moved = module.ballast.detach() - net.ballast.detach()
    assert float(moved.abs().max()) > 0, "it was not trained"
    assert float((moved - moved[0]).abs().max()) < 1e-6, "each number has the same gradient"
    rows = fitted.transform(df).select("x", "prediction").collect()
    with torch.no_grad():
        expected = module(torch.tensor([row.x for row in rows], dtype=torch.float64))
    assert torch.allclose(torch.tensor([row.prediction for row in rows], dtype=torch.float64), expected)
    with pytest.raises(InvalidInput, match=r"\(0.9 GiB\).* spark.driver.memory to 4g or more"):
        fit(LargeNet(250_000_000))
