"""The SparkSession that a call is meant for."""

from __future__ import annotations

from pyspark.sql import SparkSession

from spark_elastic.errors import InvalidInput


def session(given: SparkSession | None) -> SparkSession:
    """The given one, or the active one.

    Raises:
        InvalidInput: there is none.
    """
    chosen = given or SparkSession.getActiveSession()
    if chosen is None:
        raise InvalidInput("there is no active SparkSession: create one, or pass it as spark=.")
    return chosen


def is_connect(session: SparkSession) -> bool:
    """Whether a session is one of Spark Connect, without a SparkContext."""
    return not hasattr(session, "_jsparkSession")


def refuse_connect(session: SparkSession, what: str) -> None:
    """Raises InvalidInput where `what` needs a SparkContext and there is none."""
    if is_connect(session):
        raise InvalidInput(
            f"{what} does not work on a session of Spark Connect, which has no SparkContext: use a classic session; "
            "spark_elastic.run() works on both."
        )
