"""Which settings are remarked on at a job's start, and which are nobody's business."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from spark_elastic.spark.settings import remarks


@pytest.mark.parametrize("master", ["yarn", "k8s://https://cluster:443"])
def test_a_count_of_executor_failures_is_told_where_spark_keeps_one(master: str) -> None:
    (said,) = remarks({"spark.master": master})
    assert "set spark.executor.maxNumFailures to 1000" in said
    (said,) = remarks({"spark.master": master, "spark.executor.maxNumFailures": "4"})
    assert "failure of 4 executors" in said


@pytest.mark.parametrize(
    "settings",
    [
        {"spark.master": "spark://host:7077"},
        {"spark.master": "local[2]"},
        {"spark.master": "yarn", "spark.executor.maxNumFailures": "1000"},
        {"spark.master": "yarn", "spark.executor.failuresValidityInterval": "10m"},
    ],
)
def test_nothing_is_said_where_nothing_is_wrong(settings: dict[str, str]) -> None:
    assert remarks(settings) == []


def test_a_limit_of_the_address_space_is_told() -> None:
    (said,) = remarks({"spark.executor.pyspark.memory": "1g"})
    assert "spark.executor.memoryOverhead" in said
