"""A DataFrame's columns as Parquet in the store, with a manifest.

Owns the order of writing: Spark writes to a folder that nobody knows, the driver reads the footers once, and the
manifest, renamed into place, publishes it. Nulls and lengths are counted by the same job that writes; a second one
runs only to name the row of an error. Runs in the caller's thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame

from spark_elastic.data.footers import read_footers
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.spark.fingerprint import fingerprint
from spark_elastic.spark.scan import Scan, prepared
from spark_elastic.spark.schema import ColumnType, column_type

ROW_GROUP_BYTES = 4 << 20
ROWS_PER_GROUP = 10_000
_UNBOUNDED_BYTES = 256 << 20
_FOLDER = "data"
# Where Spark knows a file system by another name.
_SPARK_SCHEMES = {"s3": "s3a", "gcs": "gs"}


@dataclass(frozen=True)
class _Groups:
    """How row groups are cut: by rows exactly, or by bytes with at most ROWS_PER_GROUP rows."""

    rows: int
    bytes: int

    def options(self) -> dict[str, str]:
        return {
            "parquet.block.row.count.limit": str(self.rows),
            "parquet.block.size": str(self.bytes),
            # Numbers that hardly repeat: a dictionary costs time at both ends and saves nothing.
            "parquet.enable.dictionary": "false",
            # The user's session may say otherwise.
            "compression": "snappy",
            "maxRecordsPerFile": "0",
        }


def materialize(
    df: DataFrame,
    columns: Sequence[str],
    store: Store,
    rows_per_group: int | None = None,
    row_group_bytes: int = ROW_GROUP_BYTES,
) -> Manifest:
    """Write `columns` of `df` to the store, or find them there, written before from the same DataFrame.

    Vectors become float32 arrays. Each row group but the last of a file has exactly `rows_per_group` rows; without
    it, about `row_group_bytes` before compression, and 10,000 rows at most. InvalidInput for columns that hold no
    numbers, for nulls, arrays of different lengths and a DataFrame without rows; StoreError where the store cannot
    be written.
    """
    names = list(dict.fromkeys(columns))
    if not names:
        raise InvalidInput(f"No columns to write: name some of {df.columns}.")
    groups = _cut(rows_per_group, row_group_bytes)
    types = {name: column_type(df.schema, name) for name in names}
    made_from = fingerprint(df, names, groups.options())
    published = f"{_FOLDER}/{made_from}/manifest.json"
    found = _reusable(store, published)
    if found is not None:
        return found
    store.probe()
    folder = f"{_FOLDER}/{made_from}/{uuid.uuid4().hex}"
    try:
        manifest = _written(df, types, groups, store, folder, made_from)
        manifest.save(store, published)
    except BaseException:
        store.remove_tree(folder)
        raise
    return manifest


def _cut(rows_per_group: int | None, row_group_bytes: int) -> _Groups:
    for setting, value in (("rows_per_group", rows_per_group), ("row_group_bytes", row_group_bytes)):
        if value is not None and value < 1:
            raise InvalidInput(f"{setting} is {value}: it must be at least 1.")
    if rows_per_group is None:
        return _Groups(ROWS_PER_GROUP, row_group_bytes)
    return _Groups(rows_per_group, _UNBOUNDED_BYTES)


def _written(
    df: DataFrame, types: Mapping[str, ColumnType], groups: _Groups, store: Store, folder: str, made_from: str
) -> Manifest:
    """Write the columns into a folder and describe what is there; nothing of it is known to anyone yet."""
    scan, url = Scan(types), _spark_url(store, folder)
    scan.watched(prepared(df, types)).write.options(**groups.options()).mode("error").parquet(url)
    files, row_groups = read_footers(
        store, [name for name in store.list(folder) if name.endswith(".parquet")]
    )
    if not row_groups:
        raise InvalidInput("The DataFrame has no rows: there is nothing to train on.")
    shapes = scan.shapes(df.sparkSession.read.parquet(url))
    columns = tuple(Column(name, kind.dtype, shapes[name]) for name, kind in types.items())
    return Manifest(columns, files, row_groups, made_from, scan.content())


def _reusable(store: Store, published: str) -> Manifest | None:
    """The manifest of that name, if all of its files are still there."""
    if not store.exists(published):
        return None
    try:
        manifest = Manifest.load(store, published)
    except StoreError:
        # Of another version, or damaged: it is written anew, under the same name.
        return None
    folders = {name.rpartition("/")[0] for name in manifest.files}
    there = {name for folder in folders for name in store.list(folder)}
    return manifest if there.issuperset(manifest.files) else None


def _spark_url(store: Store, name: str) -> str:
    scheme, separator, rest = store.join(name).partition("://")
    return _SPARK_SCHEMES.get(scheme, scheme) + separator + rest
