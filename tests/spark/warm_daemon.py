"""Spark's Python daemon after the imports that most tasks of these tests make: its workers, forks of it, need not."""

from __future__ import annotations

import gc
import importlib

from pyspark.daemon import manager

EARLY = (
    "pandas",
    "spark_elastic.clusters.spark.slot_task",
    "spark_elastic.estimators.torch_model",
    "spark_elastic.torch",
)

if __name__ == "__main__":
    for name in EARLY:
        importlib.import_module(name)
    gc.freeze()
    manager()
