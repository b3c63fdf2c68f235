"""P8 with real fits, the long way: executors that come and go, tasks of two cores, models above every limit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster, await_true
from tests.spark.estimators import ROWS, Net, estimator, table
from tests.spark.fits import fit_through_a_loss
from tests.spark.session_settings import DYNAMIC, NARROW

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.native, pytest.mark.timeout(900)]

SPAN = {
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.shuffleTracking.timeout": "5s",  # the default keeps an executor for what it shuffled
    # One task writes the rows: Spark must not grow for those of a slow machine before the fit asks for slots.
    "spark.default.parallelism": "1",
    "spark.sql.shuffle.partitions": "1",
}


def executors(spark: SparkSession) -> int:
    """Without the driver, which is in the list too."""
    return len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1


def test_p8_a_fit_makes_dynamic_allocation_grow_and_releases_its_executors(
    spark_with: Callable[[Mapping[str, str]], SparkSession],
    standalone: StandaloneCluster,
    fault: Fault,
    tmp_path: Path,
) -> None:
    """It begins on the one executor that is there; afterwards only that many are left, and a second fit grows anew."""
    spark = spark_with(DYNAMIC | SPAN)
    for number in range(2):
        await_true(lambda: executors(spark) == 1, "the executors to be given back", 180)
        _, model = fit_through_a_loss(
            spark, standalone, fault, tmp_path / str(number), 3, again=True, gather_timeout=0.1
        )
        assert model.summary.worlds[0].size == 1


def test_p8_a_fit_works_with_two_cores_per_task(
    spark_with: Callable[[Mapping[str, str]], SparkSession],
    standalone: StandaloneCluster,
    fault: Fault,
    tmp_path: Path,
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


def make_heavy_estimator(store: Path, net: LargeNet) -> ElasticTorchEstimator:
    for module in (__name__, Net.__module__):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    return estimator(store, model=net, optimizer=optimizer, epochs=2, num_workers=2, batch_size=ROWS // 2)


def test_p8_a_fit_works_with_a_model_above_every_message_limit(
    spark_with: Callable[[Mapping[str, str]], SparkSession], spark_cluster: StandaloneCluster, tmp_path: Path
) -> None:
    """It goes to the workers, comes back trained, and goes to the executors that predict."""
    net, df = LargeNet(10_000_000), table(spark_with(NARROW))
    fitted = make_heavy_estimator(tmp_path, net).fit(df)
    module = fitted.model
    moved = module.ballast.detach() - net.ballast.detach()
    assert float(moved.abs().max()) > 0, "it was not trained"
    assert float((moved - moved[0]).abs().max()) < 1e-6, "each number has the same gradient"
    rows = fitted.transform(df).select("x", "prediction").collect()
    with torch.no_grad():
        expected = module(torch.tensor([row.x for row in rows], dtype=torch.float64))
    assert torch.allclose(torch.tensor([row.prediction for row in rows], dtype=torch.float64), expected)


def test_a_model_above_the_drivers_heap_is_refused_before_any_spark_job(
    spark_with: Callable[[Mapping[str, str]], SparkSession], spark_cluster: StandaloneCluster, tmp_path: Path
) -> None:
    df = table(spark_with(NARROW))
    with pytest.raises(InvalidInput, match=r"\(0.9 GiB\).* spark.driver.memory to 4g or more"):
        make_heavy_estimator(tmp_path, LargeNet(250_000_000)).fit(df)
