"""The order of rows by their hash: it depends on the rows alone, not on partitions, cores or lost executors.

The hash of a row says which file it is in and where. How many files there are follows from the number of rows, which is
known once they were all computed. So tasks sort what they compute and write it as Arrow has it, which costs little
beside Parquet; then others, or the driver for a small table, merge these chunks, each into a file of its own
(`sorted_rows`). Files and row groups are the same on every cluster. Runs in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from spark_elastic.clusters.spark.host_facts import has_context
from spark_elastic.data.store import Store
from spark_elastic.estimators.dataframes.scan import (
    EXACT_COLUMN,
    HASH_COLUMN,
    get_column,
    hash_columns,
    hash_row,
    quote,
)
from spark_elastic.estimators.dataframes.schema import ColumnType, compute_row_bytes
from spark_elastic.estimators.dataframes.sorted_rows import ROW, MergeTask, ReadTask, SortTask
from spark_elastic.estimators.dataframes.store_access import translate_write_errors

GROUPS_PER_FILE = 16
# A table of at most so many bytes is small: the driver merges it.
SMALL_BYTES = 8 << 20
# With a smaller share of distinct rows, copies of a row are spread over the table; else they lie side by side.
_DISTINCT = 0.9
_COPIES_PER_ARRAY = 1 << 16
_COPY = "__spark_elastic_copy"
_HASHES = (HASH_COLUMN, EXACT_COLUMN)
_BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BATCH_BYTES = 4 << 20
_UNKNOWN_BATCH = 128  # rows of a batch, if their size is not known


def add_hashes(rows: DataFrame, types: Mapping[str, ColumnType], *salts: str) -> DataFrame:
    """The rows with the two columns that decide on their order.

    Sums of float64 after a shuffle differ in their last bits from run to run: float32 decides, float64 only among rows
    that are equal in it. Rows that differ only in the sign of a zero are equal in both.
    """
    exact = hash_columns("1", *salts, *map(quote, types))
    return rows.withColumns({HASH_COLUMN: hash_row(types, *salts), EXACT_COLUMN: exact})


@dataclass(frozen=True)
class SortedChunks:
    """The rows of a table, which have the columns of `add_hashes`, in chunks in the store."""

    spark: SparkSession
    store: Store
    folder: str  # in the store; nothing else is written there
    types: Mapping[str, ColumnType]
    schema: StructType
    split: str | None  # the column that says which rows validate, if some do
    names: Mapping[bool, list[str]]  # whether rows validate -> chunks

    @classmethod
    def write(
        cls, rows: DataFrame, types: Mapping[str, ColumnType], store: Store, folder: str, split: str | None
    ) -> SortedChunks:
        """Compute the rows, once. types: of the columns that are trained on."""
        task, spark = SortTask(store, folder, HASH_COLUMN, split), rows.sparkSession
        with _limit_batches(spark, compute_row_bytes(types.values())), translate_write_errors(store):
            found = rows.select(F.struct("*").alias(ROW)).mapInArrow(task, task.SCHEMA).collect()
        names: dict[bool, list[str]] = {False: [], True: []}
        for chunk in found:
            names[chunk.validates].append(chunk.name)
        return cls(spark, store, folder, types, rows.schema, split, names)

    @property
    def files(self) -> list[str]:
        """The names of all chunks."""
        return [*self.names[False], *self.names[True]]

    def read(self, copies: str | None = None) -> DataFrame:
        """The rows. copies: each row of a chunk once, and a column of that name for the number of its copies there."""
        fields = [*self.schema.fields, *([] if copies is None else [StructField(copies, LongType())])]
        task = ReadTask(self.store, self.files, _HASHES, copies)
        row = StructType([StructField(ROW, StructType(fields))])
        numbers = self.spark.range(0, len(self.files), 1, len(self.files))
        return numbers.mapInArrow(task, row).select(f"{ROW}.*")

    def merge(
        self, folder: str, counts: Mapping[bool, int], distinct: int, rows_per_group: int, row_bytes: int
    ) -> list[list[str]]:
        """Write the rows in order; the files of each data set.

        Args:
            folder: where to write, in the store.
            counts: how many rows there are to train on (False) and, with a split, to validate with (True).
            distinct: about how many of all rows are different.
            row_bytes: of a row on average.
        """
        total = sum(counts.values())
        if distinct < _DISTINCT * total:
            return self._spread_copies().merge(folder, counts, total, rows_per_group, row_bytes)
        rows_per_file = rows_per_group * GROUPS_PER_FILE
        files = {validates: -(-count // rows_per_file) for validates, count in counts.items()}
        number = sum(files.values())
        columns = list(self.types)
        task = MergeTask(self.store, folder, self.names, files, _HASHES, columns, rows_per_group)
        # A client of Spark Connect may be far from the store.
        if total * row_bytes <= SMALL_BYTES and has_context(self.spark):
            found = {each: task.write(each) for each in range(number)}
        else:
            with translate_write_errors(self.store):
                answers = self.spark.range(0, number, 1, number).mapInArrow(task, task.SCHEMA).collect()
            found = {each.number: each.name for each in answers}
        ends = accumulate(files.values(), initial=0)
        return [[found[each] for each in range(*bounds) if found[each]] for bounds in pairwise(ends)]

    def _spread_copies(self) -> SortedChunks:
        """The same rows in the order of a hash of row and copy."""
        numbered = _number_copies(self.read(_COPY).drop(*_HASHES), len(self.files))
        rows = add_hashes(numbered, self.types, quote(_COPY))
        return self.write(rows, self.types, self.store, f"{self.folder}/copies", self.split)


@contextmanager
def _limit_batches(spark: SparkSession, row_bytes: int | None) -> Iterator[None]:
    """Have Spark give rows to Python in batches that fit into memory. Its own bound counts rows alone before 4.1."""
    before = str(spark.conf.get(_BATCH_ROWS))
    rows = _UNKNOWN_BATCH if row_bytes is None else max(1, min(10_000, _BATCH_BYTES // row_bytes))
    spark.conf.set(_BATCH_ROWS, str(rows))
    try:
        yield
    finally:
        spark.conf.set(_BATCH_ROWS, before)


def _number_copies(rows: DataFrame, partitions: int) -> DataFrame:
    """The rows, as often as their column of copies says, with a number in its place by which copies of one row differ;
    -0.0 becomes 0.0. partitions: among which the copies are divided."""
    keys = [get_column(name) for name in rows.columns if name != _COPY]
    counted = rows.groupBy(*keys).agg(F.sum(_COPY).alias(_COPY))
    # Arrays of bounded length: a row may have a billion copies.
    step, last = F.lit(_COPIES_PER_ARRAY).cast("long"), get_column(_COPY) - 1
    begun = counted.withColumn(HASH_COLUMN, F.explode(F.sequence(F.lit(0).cast("long"), last, step)))
    end = F.least(last, get_column(HASH_COLUMN) + step - 1)
    numbers = F.explode(F.sequence(get_column(HASH_COLUMN), end))
    return begun.repartition(partitions).withColumn(_COPY, numbers).drop(HASH_COLUMN)
