"""The order of rows by their hash: it depends on the rows alone, not on partitions, cores or lost executors.

The hash of a row says which file it is in and where. How many files there are follows from the number of rows, and each
is written by one task, so that files and row groups are the same on every cluster. `sort_small_table` writes the same
files in the driver: for a small table a second job of Spark takes longer. Runs in the caller's thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F

from spark_elastic.data.reading.decoding import CHECKSUMS, open_parquet
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframes.scan import (
    HASH_COLUMN,
    count_where,
    get_column,
    hash_columns,
    hash_row,
    quote,
)
from spark_elastic.estimators.dataframes.schema import ColumnType

GROUPS_PER_FILE = 16
# A table of at most so many bytes is small: the driver holds it twice while it sorts it.
SMALL_BYTES = 64 << 20
# With a smaller share of distinct rows, copies of a row are spread over the table; else they lie side by side.
_DISTINCT = 0.9
_COPIES_PER_ARRAY = 1 << 16
_FILE, _PARTITION = "__spark_elastic_file", "__spark_elastic_partition"
_HASH, _EXACT_HASH, _COPY = HASH_COLUMN, "__spark_elastic_exact", "__spark_elastic_copy"
_WORD = (1 << 32) - 1


def add_hashes(rows: DataFrame, types: Mapping[str, ColumnType], *salts: str) -> DataFrame:
    """The rows with the two columns that decide on their order.

    Sums of float64 after a shuffle differ in their last bits from run to run: float32 decides, float64 only among rows
    that are equal in it. Rows that differ only in the sign of a zero are equal in both.
    """
    exact = hash_columns("1", *salts, *map(quote, types))
    return rows.withColumns({_HASH: hash_row(types, *salts), _EXACT_HASH: exact})


class HashOrder:
    """Puts the rows of a table, which have the columns of `add_hashes`, in order for one write, and knows in which
    files they then are."""

    def __init__(
        self, types: Mapping[str, ColumnType], counts: Mapping[bool, int], distinct: int, rows_per_group: int
    ) -> None:
        """
        Args:
            types: the columns.
            counts: how many rows there are to train on (False) and, with a split, to validate with (True).
            distinct: about how many of all rows are different.
            rows_per_group: rows of a row group.
        """
        self._types = types
        self._rows_per_group = rows_per_group
        self._rows = sum(counts.values())
        rows_per_file = rows_per_group * GROUPS_PER_FILE
        self._files = {validates: -(-count // rows_per_file) for validates, count in counts.items()}
        self._spreads_copies = distinct < _DISTINCT * self._rows
        self._observation = Observation()

    def apply(self, rows: DataFrame, split: str | None) -> DataFrame:
        """The columns of `types`, with the rows of each file sorted in one partition.

        split: the column that says which rows validate, if some do.
        """
        if self._spreads_copies:
            numbered = _number_copies(rows.drop(_HASH, _EXACT_HASH))
            rows = add_hashes(numbered, self._types, quote(_COPY))
        rows = rows.withColumn(_FILE, self._number_file(split))
        total = sum(self._files.values())
        if total == 1:
            rows = rows.coalesce(1)
        else:
            keys = F.element_at(F.lit(find_partition_keys(total)), get_column(_FILE) + 1)
            rows = rows.repartition(total, keys)
        rows = rows.sortWithinPartitions(_HASH, _EXACT_HASH).withColumn(_PARTITION, F.spark_partition_id())
        misplaced = count_where(get_column(_FILE) != get_column(_PARTITION)).alias("misplaced")
        return rows.observe(self._observation, misplaced).selectExpr(*map(quote, self._types))

    def is_small(self, row_bytes: int) -> bool:
        """Whether `sort_small_table` is to write the rows, of so many bytes each on average."""
        return not self._spreads_copies and self._rows * row_bytes <= SMALL_BYTES

    def sort_small_table(
        self, store: Store, names: Sequence[str], folder: str, split: str | None
    ) -> list[list[str]]:
        """Write the rows of these files as Spark does after `apply`; returns the files of each data set.

        Args:
            folder: where to write, in the store.
            split: as in `apply`.
        """
        parts = [open_parquet(pa.BufferReader(store.read_bytes(name))).read() for name in names]
        table = pa.concat_tables(parts).replace_schema_metadata(None)
        files: list[list[str]] = []
        for validates, count in self._files.items():
            rows = table if split is None else table.filter(pc.equal(table[split], validates))
            rows = rows.append_column(_FILE, _locate_in_arrow(rows[_HASH], count))
            rows = rows.take(
                pc.sort_indices(rows, [(key, "ascending") for key in (_FILE, _HASH, _EXACT_HASH)])
            )
            found = {each["values"]: each["counts"] for each in pc.value_counts(rows[_FILE]).to_pylist()}
            ends = accumulate(found.get(number, 0) for number in range(count))
            rows = rows.select(list(self._types))
            files.append([])
            for begin, end in pairwise([0, *ends]):
                out = pa.BufferOutputStream()
                pq.write_table(
                    rows.slice(begin, end - begin), out, row_group_size=self._rows_per_group,
                    version="2.6", compression="snappy", use_dictionary=False,
                    **CHECKSUMS,
                )  # fmt: skip
                files[-1].append(f"{folder}/part-{sum(map(len, files)):05d}.parquet")
                store.write_bytes(files[-1][-1], out.getvalue().to_pybytes())
        return files

    def group_files(self, names: Sequence[str]) -> list[list[str]]:
        """The written files of each data set, in order; call it after the write.

        Raises:
            InvalidInput: this Spark has put rows elsewhere.
        """
        misplaced = self._observation.get["misplaced"]
        if misplaced:
            raise InvalidInput(
                f"This Spark has put {misplaced} rows into other partitions than Apache Spark does, so that their "
                "order is not known: fit with row_order='table'."
            )
        numbers = {name: _parse_number(name) for name in names}
        ordered = sorted(numbers, key=lambda name: (numbers[name], name))
        ends = list(accumulate(self._files.values(), initial=0))
        return [[name for name in ordered if low <= numbers[name] < high] for low, high in pairwise(ends)]

    def _number_file(self, split: str | None) -> Column:
        """The number of a row's file: first come those to train on."""
        number = self._locate(0, self._files[False])
        if split is not None:
            other = self._locate(self._files[False], self._files[True])
            number = F.when(get_column(split), other).otherwise(number)
        return number.cast("int")

    def _locate(self, first: int, files: int) -> Column:
        """The one of so many files for which the hash is, each for as large a range of hashes."""
        high = F.shiftrightunsigned(_HASH, 32)
        return F.shiftright(high * F.lit(files).cast("long"), 32) + F.lit(first)


def _locate_in_arrow(hashes: Any, files: int) -> Any:
    """As `HashOrder._locate`, of an Arrow column."""
    shift = pa.scalar(32, pa.uint64())
    high = pc.shift_right(hashes.cast(pa.uint64(), safe=False), shift)
    return pc.shift_right(pc.multiply(high, pa.scalar(files, pa.uint64())), shift)


def _number_copies(rows: DataFrame) -> DataFrame:
    """The same rows with a number, by which copies of one row differ; -0.0 becomes 0.0."""
    counted = rows.groupBy(*(get_column(name) for name in rows.columns)).agg(F.count(F.lit(1)).alias(_COPY))
    # Arrays of bounded length: a row may have a billion copies.
    step, last = F.lit(_COPIES_PER_ARRAY).cast("long"), get_column(_COPY) - 1
    begun = counted.withColumn(_HASH, F.explode(F.sequence(F.lit(0).cast("long"), last, step)))
    end = F.least(last, get_column(_HASH) + step - 1)
    return begun.withColumn(_COPY, F.explode(F.sequence(get_column(_HASH), end)))


def find_partition_keys(partitions: int) -> list[int]:
    """For each number of a partition, a key that `repartition(partitions, key)` puts there."""
    keys: dict[int, int] = {}
    candidates = _iter_hashes()
    while len(keys) < partitions:
        key, found = next(candidates)
        keys.setdefault(found % partitions, key)
    return [keys[number] for number in range(partitions)]


def _iter_hashes() -> Iterator[tuple[int, int]]:
    """Integers with their hash, Spark's Murmur3 (x86, 32 bits, seed 42), which decides on the partition."""
    key = 0
    while True:
        word = _rotate(key * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
        state = (_rotate(42 ^ word, 13) * 5 + 0xE6546B64 & _WORD) ^ 4
        state = (state ^ state >> 16) * 0x85EBCA6B & _WORD
        state = (state ^ state >> 13) * 0xC2B2AE35 & _WORD
        state ^= state >> 16
        yield key, state - (state >> 31 << 32)
        key += 1


def _rotate(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) & _WORD


def _parse_number(name: str) -> int:
    """The number of the partition that was written to a file: part-00007-..."""
    found = re.match(r"part-(\d+)", name.rpartition("/")[2])
    if found is None:
        raise InvalidInput(
            f"This Spark calls its files otherwise than Apache Spark does ({name}), so that their order is not known: "
            "fit with row_order='table'."
        )
    return int(found[1])
