"""Stores by the names that Spark has for them."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from spark_elastic.data.store import Store
from spark_elastic.spark.dataframes.store_access import to_spark_url


@pytest.mark.parametrize(
    ("given", "python", "spark"),
    [
        ("/mnt/jobs", "file:///mnt/jobs/a", "file:///mnt/jobs/a"),
        ("/dbfs/jobs", "file:///dbfs/jobs/a", "dbfs:/jobs/a"),
        ("dbfs:/jobs", "file:///dbfs/jobs/a", "dbfs:/jobs/a"),
        (
            "/Volumes/main/default/v/jobs",
            "file:///Volumes/main/default/v/jobs/a",
            "/Volumes/main/default/v/jobs/a",
        ),
        ("dbfs:/Volumes/main/default/v", "file:///Volumes/main/default/v/a", "/Volumes/main/default/v/a"),
        ("memory://jobs", "memory://jobs/a", "memory://jobs/a"),
    ],
)
def test_spark_and_the_store_name_an_object_alike(given: str, python: str, spark: str) -> None:
    store = Store.open(given)
    assert (store.join("a"), to_spark_url(store, "a")) == (python, spark)
