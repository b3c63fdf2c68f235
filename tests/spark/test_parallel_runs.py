"""Several jobs of one Spark application at once (R17)."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import spark_elastic
from tests.component.torch.hand_written import count
from tests.spark.stories import ActAtStep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.native]

for module in (__name__, count.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[module])


def world_size() -> str:
    import os

    return os.environ["WORLD_SIZE"]


def test_r17_jobs_that_need_all_slots_each_do_not_wait_for_each_other(spark: SparkSession) -> None:
    def run_one(number: int) -> list[str]:
        return spark_elastic.run(
            world_size, spark=spark, num_proc=3, min_np=3, start_timeout=120, stdout=io.StringIO()
        )

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run_one, range(3))) == [["3"] * 3] * 3


def test_w26_a_worker_is_drained_by_hand_and_no_step_is_lost(spark: SparkSession) -> None:
    handle = spark_elastic.JobHandle()
    stream = ActAtStep(lambda: handle.drain(rank=1, reason="its machine is wanted elsewhere"))
    settings: dict[str, Any] = {"num_proc": 3, "min_np": 2, "handle": handle, "gather_timeout": 60.0}
    results = spark_elastic.run(count, (20, 1, False, {10: 2}), spark=spark, stdout=stream, **settings)
    stream.thread.join()
    assert [result["number"] for result in results] == [20, 20]
    assert "its machine is wanted elsewhere" in stream.getvalue() or stream.getvalue().count("world of ") == 2
