"""The SparkSession that a call is meant for."""

from __future__ import annotations

from pyspark.sql import SparkSession

from spark_elastic.errors import InvalidInput


def session(given: SparkSession | None) -> SparkSession:
    """The given one, or the active one.

    Raises:
        InvalidInput: there is none, or it is one of Spark Connect.
    """
    chosen = given or SparkSession.getActiveSession()
    if chosen is None:
        raise InvalidInput("there is no active SparkSession: create one, or pass it as spark=.")
    if not hasattr(chosen, "_jsparkSession"):
        raise InvalidInput(
            "run() needs a SparkSession of the classic kind; Spark Connect cannot carry slots."
        )
    return chosen
