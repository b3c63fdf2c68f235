"""What Spark's UI says of our jobs. A local property of the calling thread, to which Spark Connect has no way.

Owns the words; they name the run and the slot, never a key or a value of `env`. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_elastic.spark.active_session import has_context

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

DESCRIPTION = "spark.job.description"


def describe(sc: SparkContext, what: str) -> None:
    """Say of this thread's next jobs what they are, and in brackets what the caller said of them."""
    said = sc.getLocalProperty(DESCRIPTION)
    sc.setLocalProperty(DESCRIPTION, f"spark_elastic {what}{f' ({said})' if said else ''}")


@contextmanager
def described(session: SparkSession, what: str) -> Iterator[None]:
    """The same for jobs of the caller's thread; afterwards it is as it was."""
    if not has_context(session):
        yield
        return
    sc = session.sparkContext
    before = sc.getLocalProperty(DESCRIPTION)
    describe(sc, what)
    try:
        yield
    finally:
        sc.setLocalProperty(DESCRIPTION, before)  # type: ignore[arg-type]
