"""Rows with nulls or NaN: counted and refused, or counted and left out.

Owns what counts as missing in a column of any depth. Knows nothing of where rows go. For one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F

from spark_elastic.errors import InvalidInput
from spark_elastic.spark.dataframes.schema import ColumnType

log = logging.getLogger("spark_elastic")

_FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class Missing:
    """What happens to rows with a null, or a NaN, in one of the columns, at any depth.

    refuse: an error with their number. drop: they are left out, and a log line has their number.
    """

    nulls: Literal["refuse", "drop"] = "refuse"
    nans: Literal["keep", "refuse", "drop"] = "keep"

    def __post_init__(self) -> None:
        if self.nulls not in ("refuse", "drop"):
            raise InvalidInput(f"nulls must be 'refuse' or 'drop'; got {self.nulls!r}.")
        if self.nans not in ("keep", "refuse", "drop"):
            raise InvalidInput(f"nans must be 'keep', 'refuse' or 'drop'; got {self.nans!r}.")


class Dropping:
    """Leaves rows out of a DataFrame and counts them while it is written."""

    def __init__(self, types: Mapping[str, ColumnType], missing: Missing) -> None:
        self._observation = Observation()
        self._conditions: dict[str, Column] = {}
        for name, kind in types.items():
            column = quoted(name)
            if missing.nulls == "drop":
                self._conditions[f"nulls in {name!r}"] = has_null(column, kind)
            if missing.nans == "drop" and kind.dtype in _FLOATS:
                self._conditions[f"NaN in {name!r}"] = has_nan(column, kind)

    def kept(self, df: DataFrame) -> DataFrame:
        """The rows that have nothing missing."""
        if not self._conditions:
            return df
        bad = reduce(or_, self._conditions.values())
        counters = [
            counted(condition).alias(f"c{n}") for n, condition in enumerate(self._conditions.values())
        ]
        total = [F.count(F.lit(1)).alias("rows"), counted(bad).alias("bad")]
        return df.observe(self._observation, *total, *counters).where(~bad)

    def report(self) -> None:
        """Say how many rows were left out, once they were."""
        if not self._conditions:
            return
        found = self._observation.get
        reasons = [f"{text}: {found[f'c{n}']}" for n, text in enumerate(self._conditions) if found[f"c{n}"]]
        if found["bad"]:
            log.warning("left out %d of %d rows (%s)", found["bad"], found["rows"], ", ".join(reasons))


def quoted(name: str) -> Column:
    """The column of exactly that name, dots and all."""
    return F.col("`" + name.replace("`", "``") + "`")


def counted(condition: Column) -> Column:
    """In how many rows it holds."""
    return F.count(F.when(condition, F.lit(1)))


def has_null(column: Column, kind: ColumnType) -> Column:
    """Whether the row's value, or anything in it, is null; never null itself."""
    condition, inner = column.isNull(), column
    for level in range(kind.dimensions):
        condition = condition | F.coalesce(F.exists(inner, lambda each: each.isNull()), F.lit(False))
        if level + 1 < kind.dimensions:
            inner = F.flatten(inner)
    return condition


def has_nan(column: Column, kind: ColumnType) -> Column:
    """Whether the row's value, or anything in it, is NaN; never null itself."""
    if not kind.dimensions:
        return F.coalesce(F.isnan(column), F.lit(False))
    for _ in range(kind.dimensions - 1):
        column = F.flatten(column)
    return F.coalesce(F.exists(column, F.isnan), F.lit(False))
