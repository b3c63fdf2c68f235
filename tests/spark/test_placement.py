"""Two slots of one executor: local ranks, devices and threads are each worker's own."""

from __future__ import annotations

import os
import sys

import cloudpickle
import pytest
from pyspark.sql import SparkSession

import spark_elastic
from spark_elastic.errors import PreflightError
from spark_elastic.worker.devices import collect_gpu_facts, list_visible_gpus
from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import SparkWith

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]

GPUS = {"spark.executor.cores": "4", "spark.task.cpus": "2", "spark.executor.resource.gpu.amount": "2"}


def place() -> dict[str, object]:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = {"gpu": spark_elastic.task_resources().get("gpu"), "visible": visible}
    return found | {name: os.environ[name] for name in names}


@pytest.mark.parametrize(
    "task_gpus",
    ["1", pytest.param("0.5", marks=pytest.mark.faults), pytest.param("0", marks=pytest.mark.faults)],
)
def test_two_workers_of_an_executor_have_a_gpu_each(
    spark_with: SparkWith, standalone: StandaloneCluster, task_gpus: str
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
        ("0", "0", "1"),  # programs of torch take LOCAL_RANK for the number of their device
        ("1", "0", "1"),
    ]
    assert {(one["gpu"], one["visible"]) for one in found} == {(("0",), "0"), (("1",), "1")}
    assert [one["OMP_NUM_THREADS"] for one in found] == ["2", "2"], "as many threads as spark.task.cpus"
    assert [one["OMP_NUM_THREADS"] for one in other] == ["3", "3"]


def test_slots_share_a_gpu_on_request_and_take_none_for_the_cpu(
    spark_with: SparkWith, standalone: StandaloneCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where each task of Spark's own takes a whole one."""
    standalone.start_worker(cores=4, gpus=1)
    conf = {"spark.executor.resource.gpu.amount": "1", "spark.task.resource.gpu.amount": "1"}
    spark = spark_with(GPUS | conf)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        shared = spark_elastic.run(place, num_workers=2, min_workers=2, slots_per_gpu=2, spark=spark)
        without = spark_elastic.run(place, num_workers=2, min_workers=2, device="cpu", spark=spark)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert [(one["gpu"], one["visible"]) for one in shared] == [(("0",), "0")] * 2
    assert [(one["gpu"], one["visible"]) for one in without] == [(None, "")] * 2
    assert "executors have GPUs, which this job leaves idle" in caplog.text


@pytest.mark.skipif(bool(list_visible_gpus(os.environ)), reason="this machine has GPUs")
def test_a_gpu_that_no_host_has_is_one_sentence_before_a_worker_starts(spark: SparkSession) -> None:
    with pytest.raises(PreflightError, match="device='cuda', and this host shows no GPU: look at nvidia-smi"):
        spark_elastic.run(os.getpid, num_workers=1, device="cuda", spark=spark)
    if collect_gpu_facts(os.environ).get("torch_cuda") == "":  # this torch is for the CPU
        with pytest.raises(PreflightError, match="is built without CUDA: install torch for CUDA there"):
            spark_elastic.run(os.getpid, num_workers=1, device="cuda", spark=spark, preload="torch")
