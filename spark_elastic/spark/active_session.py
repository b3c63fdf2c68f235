"""The SparkSession that a call is meant for."""

from __future__ import annotations

import logging

from pyspark.sql import SparkSession

from spark_elastic.errors import InvalidInput

log = logging.getLogger("spark_elastic.spark")


def session(given: SparkSession | None) -> SparkSession:
    """The given one, or the active one.

    Raises:
        InvalidInput: there is none.
    """
    chosen = given or SparkSession.getActiveSession()
    if chosen is None:
        raise InvalidInput("there is no active SparkSession: create one, or pass it as spark=.")
    return chosen


def has_context(session: SparkSession) -> bool:
    """Whether a session has a SparkContext: one of Spark Connect has none, and some clusters deny it to users."""
    try:
        return session.sparkContext is not None
    except Exception as error:  # of Spark, py4j or the cluster: whatever it is, no session can be used
        log.debug("no SparkContext: %s", error)
        return False
