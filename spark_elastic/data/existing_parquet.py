"""A manifest for Parquet files that another program wrote: any row groups, further columns, folders by partition.

Owns what is checked before such files are trained on: one type and one shape a column, and no nulls, by the footers
wherever these say so. Columns that petastorm encoded are described as what they decode to. Large row groups become
several. Knows nothing of Spark. Runs in the caller's thread.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column, FileColumns, Manifest, RowGroup, pack_deleted
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
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # a constant that is null
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
    found = {each.name: each for name in names for each in _parquet(store, name)}.values()
    files = [DataFile(each, partition_values(each.name)) for each in found]
    return describe_files(store, files, columns, transformed, piece_bytes, _find_fields(store, names))


@dataclass(frozen=True)
class DataFile:
    """A Parquet file of a table, and what is known of it beside its footer."""

    # The object in the store.
    info: ObjectInfo
    # Column -> the text of its one value, which is not in the file.
    constants: Mapping[str, str] = field(default_factory=dict)
    # Column -> its name in the file, for all columns of tables that map them; {}: columns have their own names.
    stored_names: Mapping[str, str] = field(default_factory=dict)
    # Column -> the id of its field in the file, for tables that know columns by ids.
    field_ids: Mapping[str, int] = field(default_factory=dict)
    # Of each row in the file, whether the table has it no more; None: it has all of them.
    deleted: npt.NDArray[np.bool_] | None = None


def describe_files(
    store: Store,
    data_files: Sequence[DataFile],
    columns: Sequence[str],
    transformed: bool = False,
    piece_bytes: int = PIECE_BYTES,
    fields: Mapping[str, Field] = MappingProxyType({}),
) -> Manifest:
    """As `describe_parquet`, of these files. fields: what petastorm says of columns."""
    files = [_File(store, each) for each in data_files]
    with_rows = [file for file in files if file.rows]
    if not with_rows:
        raise InvalidInput(f"The Parquet files in {store.url} have no rows: there is nothing to train on.")
    described = tuple(_column(name, with_rows, transformed, fields) for name in dict.fromkeys(columns))
    for column in described:
        _refuse_nulls(column, with_rows)
        _refuse_ragged(column, with_rows)
    used = {column.name for column in described}
    known = tuple(file.columns.restrict(used) for file in with_rows)
    whole = Manifest(described, tuple(file.name for file in with_rows), (), "", "", known)
    groups = tuple(
        piece
        for number, file in enumerate(with_rows)
        for group, deleted in file.row_groups(number)
        for piece in _pieces(group, deleted, whole, piece_bytes)
    )
    seen = [file.data.info for file in files], [group.deleted for group in groups if group.deleted]
    digest = hashlib.sha256(repr(seen).encode()).hexdigest()
    return replace(whole, row_groups=groups, fingerprint=digest[:32], content=digest[:32])


class _File:
    """One file's footer, and what it says of columns."""

    def __init__(self, store: Store, data: DataFile) -> None:
        """
        Raises:
            StoreError: the file is not there, or is no Parquet file, or has other rows than its table says.
        """
        self.store, self.name, self.data = store, data.info.name, data
        self.footer: pq.FileMetaData = read_footer(store, self.name)
        self.schema: pa.Schema = self.footer.schema.to_arrow_schema()
        self.columns = FileColumns(data.constants, {**data.stored_names, **self._find_by_id(data.field_ids)})
        if data.deleted is not None and len(data.deleted) != self.footer.num_rows:
            raise StoreError(
                f"{self.name!r} in the store {store.url} has {self.footer.num_rows} rows, of which its table has "
                f"deleted some among {len(data.deleted)}: the table is damaged."
            )
        self.rows = self.footer.num_rows - (0 if data.deleted is None else int(data.deleted.sum()))

    def _find_by_id(self, ids: Mapping[str, int]) -> dict[str, str]:
        """Column -> its name in the file, by the ids in the file's schema."""
        names: dict[int, str] = {}
        for each in self.schema:
            number = (each.metadata or {}).get(b"PARQUET:field_id")
            if number is not None:
                names[int(number)] = each.name
        # A column that came after the file is not in it, even if an older one had its name.
        return {name: names.get(number, f"(no field {number})") for name, number in ids.items() if names}

    def stored_name(self, column: str) -> str:
        return self.columns.stored_names.get(column, column)

    def find_type(self, column: str) -> pa.DataType | None:
        """None: the column is not in the file. A table that gives names knows all columns of its files."""
        name, known = self.stored_name(column), self.columns.stored_names
        if name not in self.schema.names or (known and column not in known):
            return None
        return self.schema.field(name).type

    def row_groups(self, number: int) -> Iterator[tuple[RowGroup, npt.NDArray[np.bool_] | None]]:
        """Each with the mask of its deleted rows."""
        begin = 0
        for index in range(self.footer.num_row_groups):
            group = self.footer.row_group(index)
            end = begin + group.num_rows
            deleted = None if self.data.deleted is None else self.data.deleted[begin:end]
            if group.num_rows:
                yield RowGroup(number, index, group.num_rows, group.total_byte_size), deleted
            begin = end

    def leaf(self, column: str) -> int:
        """The number of the stored column that tells of a column's nulls and length: its last, a vector's first."""
        leaves, name = 0, self.stored_name(column)
        for each in self.schema:
            width = _leaves(each.type)
            if each.name == name:
                return leaves if is_vector(each.type) else leaves + width - 1
            leaves += width
        raise KeyError(name)

    def first_row(self, column: str) -> pa.Array:
        """One row of a column, without reading a whole row group."""
        return next(batch for batch in self._read(column, 1, 1 << 16) if len(batch))

    def _read(self, column: str, rows: int, buffer_size: int) -> Iterator[pa.Array]:
        """The rows of a column that the table has, by so many in the file."""
        with self.store.open_read(self.name) as source:
            file = open_parquet(source, buffer_size=buffer_size)
            begin = 0
            for batch in file.iter_batches(rows, columns=[self.stored_name(column)], use_threads=False):
                values, end = batch.column(0), begin + batch.num_rows
                if self.data.deleted is not None:
                    values = values.filter(pa.array(~self.data.deleted[begin:end]))
                yield values
                begin = end

    def nulls(self, name: str) -> int:
        """How many nulls a column has, at any depth: by the footer, or by reading the column."""
        leaf, total = self.leaf(name), 0
        if not self.footer.schema.column(leaf).max_definition_level:
            return 0
        for index in range(self.footer.num_row_groups):
            statistics = self.footer.row_group(index).column(leaf).statistics
            if statistics is None or not statistics.has_null_count:
                return self._count_nulls(name)
            total += statistics.null_count
        # The nulls may be in rows that the table has no more.
        return self._count_nulls(name) if total and self.data.deleted is not None else total

    def _count_nulls(self, name: str) -> int:
        total = 0
        for batch in self._read(name, 1 << 16, 1 << 20):
            values = batch
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
            way = "fit(spark.read.format('hudi').load(...))" if kind == "hudi" else "fit_on_table"
            raise InvalidInput(
                f"{store.join(name)} holds a table of {kind}, in whose files there may be rows that it has no more: "
                f"train with {way}."
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
    arrow = files[0].find_type(name)
    if arrow is None:
        return _partition_column(name, files, transformed)
    for file in files[1:]:
        other = file.find_type(name)
        if other != arrow:
            raise InvalidInput(
                f"The column {name!r} is {arrow} in {files[0].name!r} and {other or 'missing'} in {file.name!r}: write "
                "them alike."
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
    values = [file.columns.constants.get(name) for file in files]
    if any(value is None for value in values):
        names = sorted(
            {*(files[0].columns.stored_names or files[0].schema.names), *files[0].columns.constants}
        )
        raise InvalidInput(
            f"There is no column {name!r} in {files[0].store.url}: it has {format_columns(name, names)}."
        )
    nulls = sum(file.rows for file, value in zip(files, values, strict=True) if value == NO_VALUE)
    if nulls:
        raise _null_error(name, nulls, files)
    if {str(value).lower() for value in values} <= {"true", "false"}:
        return Column(name, "bool")
    for dtype, number in (("int64", int), ("float64", float)):
        try:
            for value in values:
                number(str(value))
        except ValueError:
            continue
        return Column(name, dtype)
    return Column(name, _dtype(name, pa.string(), transformed))


def _refuse_nulls(column: Column, files: Sequence[_File]) -> None:
    nulls = sum(file.nulls(column.name) for file in files if file.find_type(column.name) is not None)
    if nulls:
        raise _null_error(column.name, nulls, files)


def _null_error(name: str, nulls: int, files: Sequence[_File]) -> InvalidInput:
    rows = sum(file.rows for file in files)
    return InvalidInput(
        f"The column {name!r} has {nulls} nulls in {rows} rows: fill them, or leave those rows out."
    )


def _refuse_ragged(column: Column, files: Sequence[_File]) -> None:
    """Judged by the number of values in each row group. Lengths that add up by chance are found when they are read."""
    if not column.shape or column.codec:
        return
    for file in files:
        if is_vector(file.find_type(column.name)) or file.data.deleted is not None:
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


def _pieces(
    group: RowGroup, deleted: npt.NDArray[np.bool_] | None, manifest: Manifest, most: int
) -> Iterator[RowGroup]:
    """The row group, or its parts, without those of which the table has no row."""
    decoded = replace(manifest, row_groups=(group,)).max_decoded_group_bytes()
    if decoded <= 2 * most or group.rows == 1:  # to cut costs a write and a read
        yield from _keep_rows(group, deleted)
        return
    # The manifest lists the pieces as row groups, so that plan, cache and prefetch do not notice.
    rows = max(1, group.rows * most // decoded)
    for first in range(0, group.rows, rows):
        count = min(rows, group.rows - first)
        piece = replace(
            group,
            rows=count,
            bytes=group.bytes * count // group.rows,
            first_row=first,
            parent_rows=group.rows,
            part_rows=rows,
        )
        yield from _keep_rows(piece, None if deleted is None else deleted[first : first + count])


def _keep_rows(group: RowGroup, deleted: npt.NDArray[np.bool_] | None) -> Iterator[RowGroup]:
    gone = 0 if deleted is None else int(deleted.sum())
    if deleted is None or gone == 0:
        yield group
    elif gone < group.rows:
        yield replace(group, rows=group.rows - gone, deleted=pack_deleted(deleted))


def _leaves(arrow: pa.DataType) -> int:
    """Columns of Parquet that a type takes."""
    if pa.types.is_struct(arrow):
        return sum(_leaves(field.type) for field in arrow)
    if pa.types.is_map(arrow):
        return _leaves(arrow.key_type) + _leaves(arrow.item_type)
    return _leaves(arrow.value_type) if is_list(arrow) else 1
