"""The order of rows by their hash: it depends on the rows alone, not on partitions, cores or lost executors.

The hash of a row says which file it is in and where. How many files there are follows from the number of rows, which is
known once they were all computed. So tasks sort what they compute and write it as Arrow has it, which costs little
beside Parquet; then others, or the driver for a small table, merge these chunks, each into a file of its own
(`sorted_rows`). Files and row groups are the same on every cluster. Runs in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from spark_elastic.clusters.spark.host_facts import has_context
from spark_elastic.data.store import Store
from spark_elastic.estimators.dataframes.scan import EXACT_COLUMN, HASH_COLUMN, hash_columns, hash_row, quote
from spark_elastic.estimators.dataframes.schema import ColumnType, compute_row_bytes
from spark_elastic.estimators.dataframes.sorted_rows import (
    CHUNK_BYTES,
    DISTINCT,
    ROW,
    CopyTask,
    MergeTask,
    ReadTask,
    RowSums,
    SortTask,
)
from spark_elastic.estimators.dataframes.store_access import translate_write_errors

GROUPS_PER_FILE = 16
# A table of at most so many bytes is small: the driver merges it.
SMALL_BYTES = 8 << 20
_COPIED_ROWS = 2_000_000  # of which the driver makes copies at most: it takes 50 bytes for each
_COPY_BYTES = 4 << 20  # of copies that a task makes at least
_MERGED_BYTES = 16 << 20  # that a task merges at least, if others are as many as sorted; a task costs 50 ms
_MOST_SHARES = 32  # of the copies of a row
_HASHES = (HASH_COLUMN, EXACT_COLUMN)
_BATCH_LIMITS = ("spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch")
# With the value of RDDs' Python workers, tasks run in those, which later serve slots: others would import all anew.
_TRACEBACK = ("spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled", "false")
_BATCH_ROWS, _BATCH_BYTES = 10_000, 4 << 20
_UNKNOWN_BATCH = 128  # rows of a batch, if their size is not known and Spark does not look at it
_UNBOUNDED = (1 << 31) - 1  # bytes; else Spark adds up the columns' sizes after each row


def add_hashes(rows: DataFrame, types: Mapping[str, ColumnType]) -> DataFrame:
    """The rows with the two columns that decide on their order.

    Sums of float64 after a shuffle differ in their last bits from run to run: float32 decides, float64 only among rows
    that are equal in it. Rows that differ only in the sign of a zero are equal in both.
    """
    exact = hash_columns("1", *map(quote, types))
    return rows.withColumns({HASH_COLUMN: hash_row(types), EXACT_COLUMN: exact})


@dataclass(frozen=True)
class SortedChunks:
    """The rows of a table, which have the columns of `add_hashes`, in chunks in the store."""

    spark: SparkSession
    sort: SortTask  # by which they were written
    types: Mapping[str, ColumnType]
    schema: StructType
    names: Mapping[bool, list[str]]  # whether rows validate -> chunks
    most: int = 1  # copies of a row; there may be fewer
    sums: RowSums = field(default_factory=RowSums)

    @classmethod
    def write(
        cls, rows: DataFrame, types: Mapping[str, ColumnType], store: Store, folder: str, split: str | None
    ) -> SortedChunks:
        """Compute the rows, once. types: of the columns that are trained on."""
        task, spark = SortTask(store, folder, _HASHES, split), rows.sparkSession
        limits = _choose_batch_limits(spark, compute_row_bytes(types.values()))
        with _set_conf(spark, limits), translate_write_errors(store):
            found = rows.select(F.struct("*").alias(ROW)).mapInArrow(task, task.SCHEMA).collect()
        chunks = (RowSums(e.content, e.mixed, e.added, np.frombuffer(e.smallest, np.uint64)) for e in found)
        return cls(spark, task, types, rows.schema, {}, sums=sum(chunks, RowSums()))._with(found)

    @property
    def files(self) -> list[str]:
        """The names of all chunks."""
        return [name for names in self.names.values() for name in names]

    def read(self) -> DataFrame:
        """The rows."""
        task = ReadTask(self.sort.store, self.files)
        row = StructType([StructField(ROW, self.schema)])
        numbers = self.spark.range(0, len(self.files), 1, len(self.files))
        return numbers.mapInArrow(task, row).select(f"{ROW}.*")

    def merge(
        self, folder: str, counts: Mapping[bool, int], rows_per_group: int, row_bytes: int
    ) -> list[list[str]]:
        """Write the rows in order; the files of each data set.

        Args:
            folder: where to write, in the store.
            counts: how many rows there are to train on (False) and, with a split, to validate with (True).
            row_bytes: of a row on average.
        """
        total, distinct = sum(counts.values()), self.sums.distinct
        has_copies = distinct < DISTINCT * total
        # Copies of few rows need not be read, so the driver makes more of them, if they need not travel either.
        makes_copies = has_copies and total <= _COPIED_ROWS and self.sort.store.is_local
        # A client of Spark Connect may be far from the store.
        most = CHUNK_BYTES if makes_copies else SMALL_BYTES
        small = total * row_bytes <= most and has_context(self.spark)
        chunks, copies, tasks = self, None, max(len(self.files), total * row_bytes // _MERGED_BYTES)
        if has_copies and total * row_bytes <= CHUNK_BYTES:  # each task makes all copies, and writes its own
            copies = CopyTask(self.sort, self.names, list(self.types), ranges=1, shares=1)
            tasks = -(-total * row_bytes // _MERGED_BYTES)
        elif has_copies:
            chunks = self._spread_copies(len(counts), distinct, total, row_bytes)
        rows_per_file = rows_per_group * GROUPS_PER_FILE
        files = {validates: -(-count // rows_per_file) for validates, count in counts.items()}
        task = MergeTask(self.sort, folder, chunks.names, files, list(self.types), rows_per_group, copies)
        rows = [] if small else self._run(task, sum(files.values()), tasks)
        found = task.write_all() if small else {row["number"]: row["name"] for row in rows}
        ends = accumulate(files.values(), initial=0)
        return [[found[each] for each in range(*bounds) if found[each]] for bounds in pairwise(ends)]

    def _spread_copies(self, sets: int, distinct: int, total: int, row_bytes: int) -> SortedChunks:
        """The same rows in the order of a hash of row and copy.

        A task reads the distinct rows of its range, and makes its share of their copies: there are many shares if few
        rows are distinct, or one has very many copies.
        """
        ranges = max(1, distinct * row_bytes // CHUNK_BYTES)
        tasks = max(1, min(len(self.files), total * row_bytes // _COPY_BYTES))
        heavy = min(_MOST_SHARES, self.most * row_bytes // CHUNK_BYTES)
        task = CopyTask(self.sort, self.names, list(self.types), ranges, max(-(-tasks // ranges), heavy))
        number = sets * ranges * task.shares
        return self._with(self._run(task, number, number))

    def _run(self, task: CopyTask | MergeTask, number: int, tasks: int) -> list[Any]:
        """What a task gives for so many numbers, divided among tasks of Spark."""
        with _set_conf(self.spark, {}), translate_write_errors(self.sort.store):
            return self.spark.range(0, number, 1, min(number, tasks)).mapInArrow(task, task.SCHEMA).collect()

    def _with(self, chunks: Sequence[Any]) -> SortedChunks:
        """The same of other chunks, as `SortTask` describes them."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for chunk in chunks:
            names[chunk["validates"]].append(chunk["name"])
        return replace(self, names=names, most=sum(chunk["most"] for chunk in chunks))


def _choose_batch_limits(spark: SparkSession, row_bytes: int | None) -> dict[str, str]:
    """The settings by which Spark gives rows to Python in batches that fit into memory."""
    limits = _BATCH_ROWS, _BATCH_BYTES
    if row_bytes is not None:
        limits = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes)), _UNBOUNDED
    elif not spark.conf.isModifiable(_BATCH_LIMITS[1]):  # it is of Spark 4.1
        limits = _UNKNOWN_BATCH, _UNBOUNDED
    return dict(zip(_BATCH_LIMITS, map(str, limits), strict=True))


@contextmanager
def _set_conf(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set these for the jobs of the block, and `_TRACEBACK` where slots are tasks of RDDs."""
    if has_context(spark):
        settings = {**settings, _TRACEBACK[0]: _TRACEBACK[1]}
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, former in before.items():
            spark.conf.unset(name) if former is None else spark.conf.set(name, former)
