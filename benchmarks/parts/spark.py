"""The Spark session of a benchmark: local, quiet, without a page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession


@contextmanager
def open_session(cores: int, **settings: str) -> Iterator[SparkSession]:
    quiet = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", **settings}
    spark = SparkSession.builder.master(f"local[{cores}]").config(map=quiet).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
