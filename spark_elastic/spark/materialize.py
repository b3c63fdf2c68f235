"""A DataFrame's columns as Parquet in the store, with a manifest.

Owns the order of writing: Spark writes to a folder that nobody knows, the driver reads the footers once, and the
manifest, renamed into place, publishes it. Nulls and lengths are counted by the same job that writes; a second one
runs only to name the row of an error. Runs in the caller's thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame

from spark_elastic.data.footers import read_footers
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.spark.fingerprint import fingerprint
from spark_elastic.spark.scan import Scan, prepared
from spark_elastic.spark.schema import column_type

ROW_GROUP_BYTES = 4 << 20
ROWS_PER_GROUP = 10_000
_UNBOUNDED_BYTES = 256 << 20
_FOLDER = "data"
# What the file system calls s3 is s3a to Spark; other names are the same.
_SPARK_SCHEMES = {"s3": "s3a", "gcs": "gs", "abfs": "abfss", "az": "abfss"}


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
    if row_group_bytes < 1 or (rows_per_group is not None and rows_per_group < 1):
        raise InvalidInput("rows_per_group and row_group_bytes must be at least 1.")
    groups = (
        _Groups(ROWS_PER_GROUP, row_group_bytes)
        if rows_per_group is None
        else _Groups(rows_per_group, _UNBOUNDED_BYTES)
    )
    types = {name: column_type(df.schema, name) for name in names}
    made_from = fingerprint(df, names, groups.options())
    published = f"{_FOLDER}/{made_from}/manifest.json"
    found = _reusable(store, published)
    if found is not None:
        return found
    store.probe()
    folder = f"{_FOLDER}/{made_from}/{uuid.uuid4().hex}"
    try:
        scan = Scan(types)
        _write(scan.watched(prepared(df, types)), _spark_url(store, folder), groups)
        files, row_groups = read_footers(store, _parquet_files(store, folder))
        if not row_groups:
            raise InvalidInput("The DataFrame has no rows: there is nothing to train on.")
        written = df.sparkSession.read.parquet(_spark_url(store, folder))
        shapes = scan.shapes(written)
        described = tuple(Column(name, types[name].dtype, shapes[name]) for name in names)
        manifest = Manifest(described, files, row_groups, made_from)
        manifest.save(store, published)
    except BaseException:
        store.remove_tree(folder)
        raise
    return manifest


def _write(df: DataFrame, url: str, groups: _Groups) -> None:
    df.write.options(**groups.options()).mode("error").parquet(url)


def _reusable(store: Store, published: str) -> Manifest | None:
    """The manifest of that name, if all of its files are still there."""
    if not store.exists(published):
        return None
    try:
        manifest = Manifest.load(store, published)
    except StoreError:
        # Of another version, or damaged: it is written anew, under the same name.
        return None
    folders = {file.name.rpartition("/")[0] for file in manifest.files}
    there = {name for folder in folders for name in store.list(folder)}
    return manifest if all(file.name in there for file in manifest.files) else None


def _parquet_files(store: Store, folder: str) -> list[str]:
    return [name for name in store.list(folder) if name.endswith(".parquet")]


def _spark_url(store: Store, name: str) -> str:
    scheme, separator, rest = store.join(name).partition("://")
    return _SPARK_SCHEMES.get(scheme, scheme) + separator + rest
