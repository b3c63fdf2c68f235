"""Launches a job over a Spark session, of classic Spark or of Spark Connect: see `make_platform`.

Runs in the caller's thread. This module imports no Spark, which `spark-elastic-run` does without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import CoordinatorLost, InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_elastic.clusters.platforms.spark_platform import SparkPlatform

T = TypeVar("T")

log = logging.getLogger("spark_elastic")

MOST_IDLE = 3  # this many coordinators lost in a row without a new checkpoint end the fit


def make_platform(spark: SparkSession, config: ElasticConfig) -> SparkPlatform:
    """The platform of a session. Spark Connect's own client has neither py4j nor what `classic` imports.

    Raises:
        InvalidInput: the session was stopped, or no job works with settings of Spark or of the driver.
    """
    platform = _choose_platform(spark, config)
    platform.check_settings()
    return platform


def _choose_platform(spark: SparkSession, config: ElasticConfig) -> SparkPlatform:
    from spark_elastic.clusters.spark.host_facts import has_context

    if has_context(spark):
        if spark.sparkContext._jsc is None:
            raise InvalidInput("the SparkSession was stopped: create one.")
        from spark_elastic.clusters.platforms.classic import ClassicPlatform

        return ClassicPlatform(spark, config)
    from spark_elastic.clusters.platforms.connect import ConnectPlatform

    return ConnectPlatform(spark, config)


def resume_after_coordinator_loss(attempt: Callable[[], T], find_checkpoints: Callable[[], object]) -> T:
    """`attempt()`, and again after the loss of its coordinator, as long as the run advances now and then.

    The loss of a coordinator is that of a driver (P7): the client takes the run's next attempt.

    Args:
        find_checkpoints: looks up the checkpoints from which the run would resume.

    Raises:
        CoordinatorLost: `MOST_IDLE` coordinators in a row were lost without a new checkpoint.
    """
    before, idle = find_checkpoints(), 0
    while True:
        try:
            return attempt()
        except CoordinatorLost as error:
            after = find_checkpoints()
            before, idle = after, 0 if after != before else idle + 1
            if idle >= MOST_IDLE:
                raise
            log.warning("%s; the run continues from its newest checkpoint", error)
