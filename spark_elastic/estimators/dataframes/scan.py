"""Nulls, lengths and digests of columns, counted by the job that writes them.

An aggregate of its own would compute the user's DataFrame twice; Spark's `observe` adds a few counters to the write.
`RowFilter` leaves out rows with nulls or NaN, `TableScan` counts them, checks the lengths of arrays and computes a
digest of all values. For one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from pyspark.ml.functions import vector_to_array
from pyspark.sql import Column, DataFrame, Observation, Row
from pyspark.sql import functions as F

from spark_elastic.checks import make_choice
from spark_elastic.data import manifest
from spark_elastic.data.packing import format_remedy
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframes.schema import ColumnType

log = logging.getLogger("spark_elastic")

_FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class MissingValues:
    """The treatment of rows with a null or NaN in one of the columns, at any depth.

    refuse: an error with their number. drop: they are left out, and a log line has their number. keep: they stay.
    """

    nulls: Literal["refuse", "drop"] = "refuse"  # in columns of any type
    nans: Literal["keep", "refuse", "drop"] = "refuse"  # in columns of floats

    def __post_init__(self) -> None:
        make_choice("refuse", "drop")("nulls", self.nulls)
        make_choice("keep", "refuse", "drop")("nans", self.nans)

    @classmethod
    def parse(cls, value: Any) -> MissingValues:
        """The parameter `missing`. Raises InvalidInput for what it cannot be."""
        wanted = {"nulls": value, "nans": value} if isinstance(value, str) else value
        if not isinstance(wanted, Mapping) or not set(wanted) <= {"nulls", "nans"}:
            raise InvalidInput(
                f"missing must be 'refuse', 'drop', or a dict of nulls and nans; got {value!r}."
            )
        return cls(**wanted)


class MissingKind(NamedTuple):
    """A kind of missing values of one column."""

    column: str  # name; "": of all columns
    what: str  # "nulls" or "NaN"

    def __str__(self) -> str:
        return f"{self.what} in {self.column!r}" if self.column else self.what

    def describe(self, number: int, rows: str) -> str:
        """The sentence that refuses them. number: of rows that have them. rows: of how many."""
        if self.what == "nulls":
            return (
                f"The column {self.column!r} has nulls in {number} of {rows}: fill them (df.fillna, Imputer) or drop "
                "those rows (missing='drop')."
            )
        return (
            f"The column {self.column!r} has NaN in {number} of {rows}: fill them (df.fillna, Imputer), drop those "
            "rows (missing='drop'), or take them as they are (missing={'nans': 'keep'})."
        )


def list_missing(types: Mapping[str, ColumnType], nulls: bool, nans: bool) -> dict[MissingKind, str]:
    """The condition of each kind of missing values that is asked for, as SQL; never null."""
    found: dict[MissingKind, str] = {}
    for name, kind in types.items():
        if nulls:
            found[MissingKind(name, "nulls")] = has_null(name, kind)
        if nans and kind.dtype in _FLOATS:
            found[MissingKind(name, "NaN")] = has_nan(name, kind)
    return found


def list_missing_in_vectors(columns: Mapping[str, Column], nans: bool) -> dict[MissingKind, Column]:
    """The same of vectors, which are no arrays yet. columns: they as arrays."""
    found: dict[MissingKind, Column] = {}
    for name, column in columns.items():
        found[MissingKind(name, "nulls")] = column.isNull()
        if nans:
            found[MissingKind(name, "NaN")] = F.coalesce(F.exists(column, F.isnan), F.lit(False))
    return found


def find_first(texts: Iterable[str], columns: Iterable[Column]) -> Column:
    """The number of the first of these conditions that holds; -1: none does."""
    conditions = F.concat(
        F.expr(f"array({', '.join(texts)})").cast("array<boolean>"), F.array(*columns).cast("array<boolean>")
    )
    return F.array_position(conditions, True).cast("int") - 1


class RowFilter:
    """Drops rows with missing values from a DataFrame and counts them while it is written."""

    def __init__(self, types: Mapping[str, ColumnType], missing: MissingValues) -> None:
        self._observation = Observation()
        found = list_missing(types, missing.nulls == "drop", missing.nans == "drop")
        if len(types) > _MOST_COUNTED:
            kinds = dict.fromkeys(kind.what for kind in found)
            found = {MissingKind("", w): has_any(c for k, c in found.items() if k.what == w) for w in kinds}
        self._conditions = found

    def apply(self, df: DataFrame) -> DataFrame:
        if not self._conditions:
            return df
        bad = F.expr(has_any(self._conditions.values()))
        counters = [count_where(F.expr(c)).alias(f"c{n}") for n, c in enumerate(self._conditions.values())]
        total = [F.count(F.lit(1)).alias("rows"), count_where(bad).alias("bad")]
        return df.observe(self._observation, *total, *counters).where(~bad)

    def log_dropped_rows(self) -> None:
        """Log how many rows were dropped; call it after the write."""
        if not self._conditions:
            return
        found = self._observation.get
        if found["bad"]:
            reasons = {kind: found[f"c{n}"] for n, kind in enumerate(self._conditions)}
            log.warning(format_left_out(found["bad"], found["rows"], reasons))


def format_left_out(number: int, rows: int, reasons: Mapping[MissingKind, int]) -> str:
    """The line of the log about rows that were left out."""
    found = ", ".join(f"{kind}: {count}" for kind, count in reasons.items() if count)
    return f"left out {number} of {rows} rows ({found})"


def quote(name: str) -> str:
    """The column of exactly that name, which may contain dots, as SQL."""
    return "`" + name.replace("`", "``") + "`"


def get_column(name: str) -> Column:
    return F.col(quote(name))


def count_where(condition: Column) -> Column:
    """Counts the rows for which the condition holds; for `count_if` Spark projects all columns twice more."""
    return F.count(F.when(condition, F.lit(1)))


# Expressions over all columns are SQL: a Column costs several calls of the JVM for each part of it, that is minutes for
# thousands of columns.


def has_any(conditions: Iterable[str]) -> str:
    """Whether one of the conditions holds: `or` would make a tree as deep as there are columns."""
    return f"array_contains(array({', '.join(conditions)}), true)"


def has_null(name: str, kind: ColumnType) -> str:
    """Whether the row's value, or anything in it, is null; never null itself."""
    inner, conditions = quote(name), [f"{quote(name)} is null"]
    for _ in range(kind.dimensions):
        conditions.append(f"coalesce(exists({inner}, each -> each is null), false)")
        inner = f"flatten({inner})"
    return f"({' or '.join(conditions)})"


def has_nan(name: str, kind: ColumnType) -> str:
    """Whether the row's value, or anything in it, is NaN; never null itself."""
    values = _flatten(name, kind)
    return (
        f"coalesce(exists({values}, each -> isnan(each)), false)" if kind.dimensions else f"isnan({values})"
    )


def has_missing(types: Mapping[str, ColumnType], nans: Collection[str]) -> str:
    """Whether the row has a null or, in the columns `nans`, NaN; never null itself."""
    single = {name: kind.dtype for name, kind in types.items() if name in nans and not kind.dimensions}
    conditions = [has_null(*each) for each in types.items() if each[0] not in single]
    conditions += [has_nan(name, types[name]) for name in nans if name not in single]
    for dtype, kind in (("float32", "float"), ("float64", "double")):
        if names := [quote(name) for name, own in single.items() if own == dtype]:
            # Null for arrays with nulls and without NaN. One array compiles in half of the time of two conditions each.
            conditions.append(f"ifnull(array_contains(array({', '.join(names)}), {kind}('NaN')), true)")
    return has_any(conditions)


def _flatten(name: str, kind: ColumnType) -> str:
    """The column with at most one dimension."""
    deeper = max(0, kind.dimensions - 1)
    return "flatten(" * deeper + quote(name) + ")" * deeper


def hash_columns(*texts: str) -> Column:
    return F.expr(f"xxhash64({', '.join(texts)})")


def hash_row(types: Mapping[str, ColumnType], *salts: str) -> Column:
    """A hash of the salts and the columns, with float64 rounded to float32."""
    return hash_columns(*salts, *(round_to_float32(name, kind) for name, kind in types.items()))


def round_to_float32(name: str, kind: ColumnType) -> str:
    """The column, with float64 as float32."""
    if kind.dtype != "float64":
        return quote(name)
    deep = kind.dimensions
    return f"cast({quote(name)} as {'array<' * deep}float{'>' * deep})"


def count_bytes(name: str, kind: ColumnType) -> str:
    values = _flatten(name, kind)
    each = f"transform({values}, each -> octet_length(each))"
    lengths = each if kind.dimensions else f"array(octet_length({values}))"
    return f"coalesce(aggregate({lengths}, 0L, (total, each) -> total + each), 0L)"


_MOST_COUNTED = 100  # of more columns, rows that are dropped are not counted by column
_SHOWN_SCALARS = 4  # scalar columns that identify a row in an error
_POSITION_COLUMN, _ROW_COLUMN = "__spark_elastic_place", "__spark_elastic_row"
HASH_COLUMN = "__spark_elastic_hash"  # `hash_row` of rows that are to be sorted
EXACT_COLUMN = "__spark_elastic_exact"  # a hash of all of their values as they are


def select_prepared(
    df: DataFrame, types: Mapping[str, ColumnType], others: Mapping[str, Column] | None = None
) -> DataFrame:
    """The columns of `types`, ML vectors (dense and sparse) as arrays, and `others` as they are."""
    vectors = {name: convert_column(get_column(name), kind) for name, kind in types.items() if kind.vector}
    added = {**(others or {}), **vectors}
    plain = [
        quote(name) if kind.cast is None else f"cast({quote(name)} as {kind.cast}) as {quote(name)}"
        for name, kind in types.items()
    ]
    for name, column in added.items():
        df = df.withColumn(name, column)
    return df.selectExpr(*plain, *map(quote, others or ()))


def convert_column(column: Column, kind: ColumnType) -> Column:
    """The column in the type in which it is written: vectors as arrays, decimals as doubles."""
    if not kind.vector:
        return column if kind.cast is None else column.cast(kind.cast)
    # vector_to_array fails on nulls, but they must be counted.
    return F.when(column.isNotNull(), vector_to_array(column, kind.dtype))


class TableScan:
    """The counters of one write of the columns; shapes and digests are computed from them."""

    def __init__(
        self,
        types: Mapping[str, ColumnType],
        nans: bool = False,
        split: str | None = None,
        placed: bool = True,
        ragged: bool = False,
    ) -> None:
        """nans: also count NaN, and refuse it. split: the column that says which rows validate. placed: whether
        `digest` depends on the order of rows; else they have hashes. ragged: whether arrays of numbers may be so."""
        self._types, self._ragged = types, ragged
        self._split = split
        self._placed = placed
        self._nans = {name for name, kind in types.items() if nans and kind.dtype.startswith("float")}
        self._observation = Observation()

    def observe(self, df: DataFrame) -> DataFrame:
        """`df`, a result of `select_prepared`, with the counters; write it once."""
        # The id is the row's partition and position, hence its file: the digest depends on the order of rows. It is a
        # column of its own, since Spark 3.5 cannot compute it in a counter.
        validates = [] if self._split is None else [quote(self._split)]
        texts = [count_bytes(name, kind) for name, kind in self._types.items() if kind.dtype == "object"]
        counters = [
            F.count(F.lit(1)).alias("rows"),
            *(count_where(F.expr(column)).alias("validating") for column in validates),
            count_where(F.expr(has_missing(self._types, self._nans))).alias("missing"),
        ]
        added: dict[str, Column] = {}
        row, content = HASH_COLUMN, F.col(EXACT_COLUMN)
        if self._placed:
            row, content = _ROW_COLUMN, hash_columns(_POSITION_COLUMN, *map(quote, self._types), *validates)
            added = {_POSITION_COLUMN: F.monotonically_increasing_id(), row: hash_row(self._types)}
            df = df.withColumns(added)
        mixed = hash_columns(row, *validates)
        counters += [F.bit_xor(content).alias("content"), F.bit_xor(mixed).alias("mixed")]
        counters += _sum_halves(F.shiftrightunsigned(mixed, 32))  # equal rows cancel out in `mixed`
        if texts:
            total = f"aggregate(array({', '.join(texts)}), 0L, (total, each) -> total + each)"
            counters.append(F.expr(f"sum({total}) as bytes"))
        for number, (name, kind) in enumerate(self._types.items()):
            for level, sizes in enumerate(_iter_sizes(name, kind.dimensions)):
                counters.append(F.expr(f"min(array_min({sizes})) as min{number}_{level}"))
                counters.append(F.expr(f"max(array_max({sizes})) as max{number}_{level}"))
            if self._may_be_ragged(kind):
                counters.append(F.expr(f"sum(size({quote(name)})) as values{number}"))
        # Each projection of a wide table costs as much as half of its writing.
        return df.observe(self._observation, *counters).drop(*added)

    def digest(self) -> str:
        """A digest of every value and, where rows are placed, its position; it detects changes, not attacks."""
        return f"{_hex(self._observation.get['content'])}-{self.digest_rows()}"

    def digest_rows(self) -> str:
        """The number of rows, and a digest of them in any order, with float64 rounded to float32: see `add_hashes`."""
        found = self._observation.get
        return f"{found['rows']}-{_hex(found['mixed'])}{_hex(_add_halves(found))}"

    def count_rows(self) -> dict[bool, int]:
        """The rows to train on (False) and, with a split, those to validate with (True), after the write."""
        found = self._observation.get
        if self._split is None:
            return {False: found["rows"]}
        return {False: found["rows"] - found["validating"], True: found["validating"]}

    def count_bytes(self, columns: Sequence[manifest.Column]) -> int:
        found = self._observation.get
        total: int = found.get("bytes") or 0
        for number, column in enumerate(columns):
            if column.ragged not in ("", "object"):  # the bytes of strings are counted
                total += found[f"values{number}"] * np.dtype(column.ragged).itemsize
        return total

    def _may_be_ragged(self, kind: ColumnType) -> bool:
        return self._ragged and kind.dimensions == 1 and not kind.vector

    def describe_columns(self, written: Callable[[], DataFrame]) -> tuple[manifest.Column, ...]:
        """The columns as they are read, after the write. Raises InvalidInput for nulls, and for arrays of different
        lengths where these must not be; a job of its own finds a bad row to name in what `written` opens."""
        found = self._observation.get
        if found["missing"]:
            self._refuse_missing(written(), found["rows"])
        columns = []
        for number, (name, kind) in enumerate(self._types.items()):
            if self._may_be_ragged(kind) and found[f"min{number}_0"] != found[f"max{number}_0"]:
                columns.append(manifest.Column(name, "object", ragged=kind.dtype))
            else:
                shape = (self._find_length(found, number, level, written) for level in range(kind.dimensions))
                columns.append(manifest.Column(name, kind.dtype, tuple(shape)))
        return tuple(columns)

    def _refuse_missing(self, written: DataFrame, rows: int) -> None:
        kinds = list_missing(self._types, nulls=True, nans=bool(self._nans))
        texts = (f"count(if({text}, 1, null)) as c{n}" for n, text in enumerate(kinds.values()))
        counts = written.selectExpr(*texts).first()
        for number, kind in enumerate(kinds):
            if counts is not None and counts[f"c{number}"]:
                raise InvalidInput(kind.describe(counts[f"c{number}"], f"{rows} rows"))

    def _find_length(
        self, counted: Mapping[str, int], number: int, level: int, written: Callable[[], DataFrame]
    ) -> int:
        shortest, longest = counted[f"min{number}_{level}"], counted[f"max{number}_{level}"]
        name = list(self._types)[number]
        if shortest != longest:
            row = self._describe_row(written(), name, level, shortest)
            raise InvalidInput(
                f"The arrays of column {name!r} have different lengths, {shortest} and {longest}"
                f"{f' (at depth {level + 1})' if level else ''}: {row} has {shortest}; "
                f"{format_remedy(self._types[name].dimensions)}."
            )
        if not longest:
            raise InvalidInput(f"The arrays of column {name!r} are empty: leave the column out.")
        return longest

    def _describe_row(self, written: DataFrame, name: str, level: int, length: int) -> str:
        """Describes a row with an array of that length, by its scalar columns or, without any, by its content."""
        sizes = F.expr(list(_iter_sizes(name, self._types[name].dimensions))[level])
        scalars = [each for each, kind in self._types.items() if not kind.dimensions][:_SHOWN_SCALARS]
        shown = scalars or [name]
        bad = written.where(F.array_contains(sizes, length))
        row: Row | None = bad.select(*map(get_column, shown)).first()
        if row is None:
            return "a row"
        values = ", ".join(f"{each}={str(row[each])[:60]}" for each in shown)
        return f"the row with {values}"


def extract_row_digest(content: str) -> str:
    """The part of a manifest's `content` that is `TableScan.digest_rows`."""
    _, _, rows = content.partition("/")[0].partition("-")
    return rows


def _sum_halves(number: Column) -> tuple[Column, Column]:
    """The sum of 32 bits as counters of its high bits and its low 16: ANSI mode refuses a sum that overflows."""
    high, low = F.shiftrightunsigned(number, 16), number.bitwiseAND(0xFFFF)
    return F.sum(high).alias("added_high"), F.sum(low).alias("added_low")


def _add_halves(found: Mapping[str, int | None]) -> int:
    return ((found["added_high"] or 0) << 16) + (found["added_low"] or 0)


def _hex(number: int | None) -> str:
    """16 hex digits; None, for a table without rows, counts as 0."""
    return f"{(number or 0) & (1 << 64) - 1:016x}"


def _iter_sizes(name: str, dimensions: int) -> Iterator[str]:
    inner = quote(name)
    for level in range(dimensions):
        if level == 0:
            yield f"array(size({inner}))"
        else:
            yield f"transform({inner}, each -> size(each))"
            inner = f"flatten({inner})"
