"""A manifest for Parquet files that somebody else wrote: any row groups, further columns, folders by partition.

Owns what is checked before such files are trained on: one type and one shape a column, and no nulls, by the footers
wherever these say so. Columns that petastorm encoded are described as what they decode to. Large row groups become
several. Knows nothing of Spark. Runs in the caller's thread.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column, Manifest, RowGroup
from spark_elastic.data.reading.decoding import (
    dtype_of,
    is_list,
    is_vector,
    open_parquet,
    partition_values,
    read_footer,
)
from spark_elastic.data.reading.unischema import Field, describe_field, find_unischema
from spark_elastic.data.store import ObjectInfo, Store
from spark_elastic.errors import InvalidInput, StoreError, format_columns

PIECE_BYTES = 4 << 20
VECTOR_DTYPE = "float32"
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_PARQUET = (".parquet", ".parq", ".pq")


def locate_files(paths: Sequence[str], storage_options: Mapping[str, Any]) -> tuple[Store, tuple[str, ...]]:
    """One store that holds all the files or folders (one at least), paths or fsspec urls, and their names in it.

    Raises:
        InvalidInput: they lie in different file systems.
    """
    stores = [Store.open(path, **storage_options) for path in paths]
    first = stores[0]
    for path, other in zip(paths, stores, strict=True):
        if other.filesystem != first.filesystem:
            raise InvalidInput(
                f"{path!r} and {paths[0]!r} lie in different file systems: read one at a time."
            )
    common = posixpath.commonpath([store.root for store in stores])
    if common.endswith(_PARQUET) and first.filesystem.isfile(common):
        common = posixpath.dirname(common)
    url = first.url[: len(first.url) - len(first.root) + len(common)]
    names = tuple(store.root[len(common) :].strip("/") for store in stores)
    return replace(first, url=url, root=common), names


def describe_parquet(
    store: Store,
    columns: Sequence[str],
    transformed: bool = False,
    piece_bytes: int = PIECE_BYTES,
    names: Sequence[str] = ("",),
) -> Manifest:
    """The Parquet files under the store's root, or under `names` in it, as a data set of `columns`.

    transformed: a transformation makes numbers of bytes, strings, dates and timestamps. Row groups of more than
    twice `piece_bytes` when decoded are taken in pieces of that size, which readers cut once.

    Raises:
        InvalidInput: no such column, other types in other files, nulls (with their number), arrays of different
            lengths, no rows, a table of Delta, Iceberg or Hudi. StoreError: no Parquet files, or unreadable ones.
    """
    # A file that several of the names lead to is there once.
    found = list({each.name: each for name in names for each in _parquet(store, name)}.values())
    files = [_File(store, each) for each in found]
    with_rows = [file for file in files if file.footer.num_rows]
    if not with_rows:
        raise InvalidInput(f"The Parquet files in {store.url} have no rows: there is nothing to train on.")
    fields = _find_fields(store, names)
    described = tuple(_column(name, with_rows, transformed, fields) for name in dict.fromkeys(columns))
    for column in described:
        _refuse_nulls(column, with_rows)
        _refuse_ragged(column, with_rows)
    whole = Manifest(described, tuple(file.name for file in with_rows), (), "", "")
    groups = tuple(
        piece
        for number, file in enumerate(with_rows)
        for group in file.row_groups(number)
        for piece in _pieces(group, whole, piece_bytes)
    )
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    return replace(whole, row_groups=groups, fingerprint=digest[:32], content=digest[:32])


class _File:
    """One file's footer, and what it says of columns."""

    def __init__(self, store: Store, found: ObjectInfo) -> None:
        self.store, self.name = store, found.name
        self.footer: pq.FileMetaData = read_footer(store, found.name)
        self.schema: pa.Schema = self.footer.schema.to_arrow_schema()

    def row_groups(self, number: int) -> Iterator[RowGroup]:
        for index in range(self.footer.num_row_groups):
            group = self.footer.row_group(index)
            if group.num_rows:
                yield RowGroup(number, index, group.num_rows, group.total_byte_size)

    def leaf(self, name: str) -> int:
        """The number of the stored column that tells of a column's nulls and length: its last, a vector's first."""
        leaves = 0
        for field in self.schema:
            width = _leaves(field.type)
            if field.name == name:
                return leaves if is_vector(field.type) else leaves + width - 1
            leaves += width
        raise KeyError(name)

    def first_row(self, name: str) -> pa.Array:
        """One row of a column, without reading a whole row group."""
        with self.store.open_read(self.name) as source:
            file = open_parquet(source, buffer_size=1 << 16)
            batches = file.iter_batches(1, columns=[name], use_threads=False)
            return next(batch for batch in batches if batch.num_rows).column(0)

    def nulls(self, name: str) -> int:
        """How many nulls a column has, at any depth: by the footer, or by reading the column."""
        leaf, total = self.leaf(name), 0
        if not self.footer.schema.column(leaf).max_definition_level:
            return 0
        for index in range(self.footer.num_row_groups):
            statistics = self.footer.row_group(index).column(leaf).statistics
            if statistics is None or not statistics.has_null_count:
                return self._count_values(name)
            total += statistics.null_count
        return total

    def _count_values(self, name: str) -> int:
        total = 0
        with self.store.open_read(self.name) as source:
            file = open_parquet(source, buffer_size=1 << 20)
            for batch in file.iter_batches(columns=[name], use_threads=False):
                values = batch.column(0)
                total += values.null_count
                while is_list(values.type):
                    values = values.flatten()
                    total += values.null_count
        return total


def _parquet(store: Store, name: str) -> list[ObjectInfo]:
    """What Spark and others take for data: names that begin with _ or . are not."""
    listed = store.find(name)
    _refuse_table_formats(store, name, listed)
    found = [
        each
        for each in listed
        if each.name.endswith(_PARQUET)
        and not any(part.startswith(("_", ".")) for part in each.name[len(name) :].split("/"))
    ]
    if not found:
        raise StoreError(f"There is no Parquet file under {store.join(name)}.")
    return found


def _refuse_table_formats(store: Store, name: str, listed: Sequence[ObjectInfo]) -> None:
    """Their folders also hold files whose rows were deleted or updated; only the format's own log knows which."""
    for each in listed:
        *folders, file = each.name[len(name) :].split("/")
        iceberg = folders[-1:] == ["metadata"] and ".metadata.json" in file
        kind = "delta" if "_delta_log" in folders else "hudi" if ".hoodie" in folders else None
        kind = "iceberg" if iceberg else kind
        if kind is not None:
            raise InvalidInput(
                f"{store.join(name)} holds a table of {kind}, in whose files there may be rows that it has no more: "
                f"train with fit(spark.read.format({kind!r}).load(...))."
            )


def _find_fields(store: Store, names: Sequence[str]) -> dict[str, Field]:
    """What petastorm's schemas say of the columns, by name; nothing for files that petastorm did not write."""
    found = [find_unischema(store, name) for name in names]
    if any(fields != found[0] for fields in found):
        raise InvalidInput(
            f"The paths in {store.url} belong to petastorm data sets of different schemas: train on one at a time."
        )
    return found[0]


def _column(name: str, files: Sequence[_File], transformed: bool, fields: Mapping[str, Field]) -> Column:
    if name not in files[0].schema.names:
        return _partition_column(name, files, transformed)
    arrow = files[0].schema.field(name).type
    for file in files[1:]:
        other = file.schema.field(name).type if name in file.schema.names else "missing"
        if other != arrow:
            raise InvalidInput(
                f"The column {name!r} is {arrow} in {files[0].name!r} and {other} in {file.name!r}: write them alike."
            )
    field = fields.get(name)
    if field is not None and field.codec_name:
        return describe_field(field, files[0].first_row(name)[0].as_py())
    if is_vector(arrow):
        vector = files[0].first_row(name)
        size = vector.field("size")[0].as_py()
        return Column(name, VECTOR_DTYPE, (size if size is not None else len(vector.field("values")[0]),))
    shape: list[int] = []
    values = files[0].first_row(name) if is_list(arrow) else None
    while is_list(arrow):
        assert values is not None
        if not len(values) or not values[0].is_valid:
            raise InvalidInput(
                f"The column {name!r} begins with an empty array or a null: leave the row out."
            )
        shape.append(len(values[0]))
        values, arrow = values.flatten(), arrow.value_type
    dtype = _dtype(name, arrow, transformed)
    # petastorm keeps numbers in the next type that Parquet or Spark has: uint8 as int16.
    is_number = field is not None and np.dtype(dtype).kind in "biuf"
    return Column(name, (field.dtype if field and is_number else None) or dtype, tuple(shape))


def _dtype(name: str, arrow: pa.DataType, transformed: bool) -> str:
    dtype = dtype_of(arrow)
    if dtype is None or (Column(name, dtype).is_raw and not transformed):
        raise InvalidInput(
            f"The column {name!r} is {arrow}, which cannot be trained on: give numbers, booleans, arrays of them or "
            "ML vectors, or a transformation that makes numbers of it."
        )
    return dtype


def _partition_column(name: str, files: Sequence[_File], transformed: bool) -> Column:
    values = [partition_values(file.name).get(name) for file in files]
    if any(value is None for value in values):
        names = sorted({*files[0].schema.names, *partition_values(files[0].name)})
        raise InvalidInput(
            f"There is no column {name!r} in {files[0].store.url}: it has {format_columns(name, names)}."
        )
    nulls = sum(file.footer.num_rows for file, value in zip(files, values, strict=True) if value == _NO_VALUE)
    if nulls:
        raise _null_error(name, nulls, files)
    for dtype, number in (("int64", int), ("float64", float)):
        try:
            for value in values:
                number(str(value))
        except ValueError:
            continue
        return Column(name, dtype)
    return Column(name, _dtype(name, pa.string(), transformed))


def _refuse_nulls(column: Column, files: Sequence[_File]) -> None:
    nulls = sum(file.nulls(column.name) for file in files if column.name in file.schema.names)
    if nulls:
        raise _null_error(column.name, nulls, files)


def _null_error(name: str, nulls: int, files: Sequence[_File]) -> InvalidInput:
    rows = sum(file.footer.num_rows for file in files)
    return InvalidInput(
        f"The column {name!r} has {nulls} nulls in {rows} rows: fill them, or leave those rows out."
    )


def _refuse_ragged(column: Column, files: Sequence[_File]) -> None:
    """Judged by the number of values in each row group. Lengths that add up by chance are found when they are read."""
    if not column.shape or column.codec:
        return
    for file in files:
        if is_vector(file.schema.field(column.name).type):
            continue
        leaf = file.leaf(column.name)
        for index in range(file.footer.num_row_groups):
            group = file.footer.row_group(index)
            values = group.column(leaf).num_values
            if values != group.num_rows * math.prod(column.shape):
                raise InvalidInput(
                    f"The arrays of column {column.name!r} have different lengths: row group {index} of "
                    f"{file.name!r} has {values} values in {group.num_rows} rows, and the first row has shape "
                    f"{column.shape}; pad or cut them to one length."
                )


def _pieces(group: RowGroup, manifest: Manifest, most: int) -> Iterator[RowGroup]:
    decoded = replace(manifest, row_groups=(group,)).max_decoded_group_bytes()
    if decoded <= 2 * most or group.rows == 1:  # to cut costs a write and a read
        yield group
        return
    # The manifest lists the pieces as row groups, so that plan, cache and prefetch do not notice.
    rows = max(1, group.rows * most // decoded)
    for first in range(0, group.rows, rows):
        count = min(rows, group.rows - first)
        yield replace(
            group,
            rows=count,
            bytes=group.bytes * count // group.rows,
            first_row=first,
            parent_rows=group.rows,
        )


def _leaves(arrow: pa.DataType) -> int:
    """Columns of Parquet that a type takes."""
    if pa.types.is_struct(arrow):
        return sum(_leaves(field.type) for field in arrow)
    if pa.types.is_map(arrow):
        return _leaves(arrow.key_type) + _leaves(arrow.item_type)
    return _leaves(arrow.value_type) if is_list(arrow) else 1
