"""Two slots of one executor: local ranks, devices and threads are each worker's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import cloudpickle
import pytest

import spark_elastic
from tests.spark.cluster import StandaloneCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]

GPUS = {
    "spark.executor.cores": "4",
    "spark.task.cpus": "2",
    "spark.executor.resource.gpu.amount": "2",
}


def place() -> dict[str, object]:
    import os

    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return {"gpu": spark_elastic.task_resources()["gpu"], **{name: os.environ[name] for name in names}}


@pytest.mark.parametrize(
    "task_gpus",
    ["1", pytest.param("0.5", marks=pytest.mark.faults), pytest.param("0", marks=pytest.mark.faults)],
)
def test_two_workers_of_an_executor_have_a_gpu_each(
    spark_with: Callable[[Mapping[str, str]], SparkSession], standalone: StandaloneCluster, task_gpus: str
) -> None:
    """Each has a GPU to itself, also where Spark's own tasks share them, or get none."""
    standalone.start_worker(cores=4, gpus=2)
    spark = spark_with(GPUS | ({} if task_gpus == "0" else {"spark.task.resource.gpu.amount": task_gpus}))
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        found = spark_elastic.run(place, num_workers=2, min_workers=2, spark=spark)
        other = spark_elastic.run(place, num_workers=2, min_workers=2, cpus_per_worker=3, spark=spark)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert [(one["RANK"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in found] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert {one["gpu"] for one in found} == {("0",), ("1",)}
    assert [one["OMP_NUM_THREADS"] for one in found] == ["2", "2"], "as many threads as spark.task.cpus"
    assert [one["OMP_NUM_THREADS"] for one in other] == ["3", "3"]
