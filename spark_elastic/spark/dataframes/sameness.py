"""Whether a DataFrame still has the rows that a data set was written from (R19).

The fingerprint answers without a job where the plan shows it: in the application that wrote them, that is, since most
plans look different to another driver. Else the rows are counted and hashed by one job. Runs in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame

from spark_elastic.data.manifest import Manifest
from spark_elastic.spark.dataframes.materialize import Split, Writing, column_types, origin, sided
from spark_elastic.spark.dataframes.scan import Dropping, Scan, rows_of
from spark_elastic.spark.dataframes.schema import ColumnType


@dataclass(frozen=True)
class How:
    """How the rows were written: as for `materialize`."""

    writing: Writing
    split: Split | None


def difference(df: DataFrame, columns: Sequence[str], how: How, written: Sequence[Manifest]) -> str | None:
    """What tells `df` from what was written, as the end of a sentence; None where nothing does.

    columns: as for writing. written: what came of it, one data set or the two sides of a split.
    """
    names = list(dict.fromkeys(columns))
    types = column_types(df, names, how.writing)
    for name, kind in types.items():
        before = written[0].column(name).dtype
        if kind.dtype != before:
            return f"column {name!r} was {before} and is {kind.dtype}"
    if origin(df, names, how.writing, how.split) == written[0].fingerprint:
        return None
    rows = sum(manifest.rows for manifest in written)
    return told_apart(rows, written[0].content, _rows(df, types, how))


def told_apart(rows: int, content: str, now: str) -> str | None:
    """rows, content: of what was written; an older release's says nothing of values. now: as `Scan.rows`."""
    number = int(now.partition("-")[0])
    if number != rows:
        return f"it had {rows} rows and has {number}"
    return "its rows have other values" if rows_of(content) not in (now, None) else None


def _rows(df: DataFrame, types: Mapping[str, ColumnType], how: How) -> str:
    scan = Scan(types)
    kept = Dropping(types, how.writing.missing).kept(sided(df, types, how.split))
    scan.watched(kept).write.format("noop").mode("overwrite").save()
    return scan.rows()
