"""Reads the footers of many Parquet files by one Spark job, whose tasks send back arrays.

Runs in the caller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.clusters.spark.host_facts import describe_jobs, has_context
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.tables.footers import (
    CollectFooters,
    DataFile,
    FileFacts,
    collect_footers,
    collect_footers_in_threads,
)
from spark_elastic.tables.predicate import Predicate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MANY_FILES = 2_000  # fewer are read by threads of the driver before a Spark job has begun
FILES_PER_TASK = 500

log = logging.getLogger("spark_elastic")


def make_footer_collector(session: SparkSession) -> CollectFooters:
    """Collects footers on executors if there are many, and the session has a SparkContext; else in the driver."""

    def collect(
        store: Store, files: Sequence[DataFile], columns: Sequence[str], where: Predicate | None
    ) -> list[FileFacts]:
        if len(files) < MANY_FILES or not has_context(session):
            return collect_footers_in_threads(store, files, columns, where)
        parts = [files[start : start + FILES_PER_TASK] for start in range(0, len(files), FILES_PER_TASK)]
        task = partial(_read_part, store, list(columns), where)
        try:
            with describe_jobs(session, "reads footers"):
                answers = session.sparkContext.parallelize(parts, len(parts)).map(task).collect()
        except Exception as error:
            if "No module named" not in str(error):
                raise
            log.info("executors do not have this package yet: the driver reads %d footers", len(files))
            return collect_footers_in_threads(store, files, columns, where)
        found: list[FileFacts] = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            found.extend(answer)
        return found

    return collect


def _read_part(
    store: Store, columns: Sequence[str], where: Predicate | None, files: Sequence[DataFile]
) -> list[FileFacts] | StoreError | InvalidInput:
    """Runs in a task. Spark would try an error again, and hide it in a trace."""
    try:
        return collect_footers(store, files, columns, where)
    except (StoreError, InvalidInput) as error:
        return error
