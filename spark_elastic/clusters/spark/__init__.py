"""Jobs over a session of Spark, classic or Connect: slots, probes, settings. Knows no training.

This module imports no Spark, which `spark-elastic-run` does without.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput

if TYPE_CHECKING:
    from types import ModuleType

    from pyspark.sql import SparkSession

    from spark_elastic.clusters.spark.platform import SparkPlatform


def follow(pyspark: ModuleType) -> None:
    """Let `SparkFiles` find in a training process what it finds in the task of the process's slot, once pyspark is
    imported beside Spark's Python worker. Main thread."""
    from spark_elastic.worker.context import get_process_context

    if folder := get_process_context().files:
        with suppress(ImportError):  # a client for Spark Connect alone has no files of Spark's
            from pyspark import SparkFiles

            SparkFiles._root_directory = folder  # as Spark's Python worker does
            SparkFiles._is_running_on_worker = True


def make_platform(spark: SparkSession, config: ElasticConfig) -> SparkPlatform:
    """The platform of a session. Spark Connect's own client has neither py4j nor what `classic` imports. Raises
    InvalidInput: the session was stopped, or no job works with settings of Spark or of the driver."""
    from spark_elastic.clusters.spark.host_facts import has_context

    platform: SparkPlatform
    if not has_context(spark):
        from spark_elastic.clusters.spark.connect import ConnectPlatform

        platform = ConnectPlatform(spark, config)
    elif spark.sparkContext._jsc is None:
        raise InvalidInput("the SparkSession was stopped: create one.")
    else:
        from spark_elastic.clusters.spark.classic import ClassicPlatform

        platform = ClassicPlatform(spark, config)
    platform.check_settings()
    return platform
