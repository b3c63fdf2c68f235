"""Reads the footers of many Parquet files by one Spark job, whose tasks send back arrays.

Runs in the caller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.data.footers import (
    CollectFooters,
    DataFile,
    Footers,
    collect_footers,
    collect_footers_in_threads,
    join_footers,
)
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.spark.session import describe_jobs, has_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MANY_FILES = 2_000  # fewer are read by threads of the driver before a Spark job has begun
FILES_PER_TASK = 500

log = logging.getLogger("spark_elastic")


def make_footer_collector(session: SparkSession) -> CollectFooters:
    """Collects footers on executors if there are many, and the session has a SparkContext; else in the driver."""

    def collect(store: Store, files: Sequence[DataFile], columns: Sequence[str]) -> Footers:
        if len(files) < MANY_FILES or not has_context(session):
            return collect_footers_in_threads(store, files, columns)
        try:
            return collect_on_executors(session, store, files, columns)
        except Exception as error:
            if "No module named" not in str(error):
                raise
            log.info("executors do not have this package yet: the driver reads %d footers", len(files))
            return collect_footers_in_threads(store, files, columns)

    return collect


def collect_on_executors(
    session: SparkSession, store: Store, files: Sequence[DataFile], columns: Sequence[str]
) -> Footers:
    """Raises StoreError as `collect_footers` does."""
    parts = [files[start : start + FILES_PER_TASK] for start in range(0, len(files), FILES_PER_TASK)]
    with describe_jobs(session, "reads footers"):
        task = partial(_read_part, store, list(columns))
        answers = session.sparkContext.parallelize(parts, len(parts)).map(task).collect()
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    return join_footers([answer for answer in answers if isinstance(answer, Footers)])


def _read_part(store: Store, columns: Sequence[str], files: Sequence[DataFile]) -> Footers | StoreError:
    """Runs in a task. Spark would try an error again, and hide it in a trace."""
    try:
        return collect_footers(store, files, columns)
    except StoreError as error:
        return error
