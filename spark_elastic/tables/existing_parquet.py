"""A manifest for Parquet files that another program wrote: any row groups, further columns, folders by partition.

Owns what is checked before such files are trained on: one type and one shape a column, and no nulls, by the footers
wherever these say so. Large row groups become several. Knows nothing of Spark. Runs in the caller's thread.
"""

from __future__ import annotations

import hashlib
import logging
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa

from spark_elastic.data.manifest import (
    Column,
    FileColumns,
    Manifest,
    RowGroups,
    compute_decoded_bytes,
    pack_deleted,
    reuse_equal,
)
from spark_elastic.data.packing import format_remedy
from spark_elastic.data.reading.decoding import dtype_of, is_list, is_vector, partition_values
from spark_elastic.data.reading.unischema import Field, describe_field, find_unischema
from spark_elastic.data.store import ObjectInfo, Store
from spark_elastic.errors import InvalidInput, StoreError, format_columns
from spark_elastic.tables.footers import (
    NO_VALUE,
    CollectFooters,
    DataFile,
    FileFacts,
    FileFooter,
    FileSchema,
    Int64s,
    collect_footers_in_threads,
    count_elements,
    drop_excluded,
)
from spark_elastic.tables.predicate import Predicate

log = logging.getLogger("spark_elastic")

PIECE_BYTES = 4 << 20
VECTOR_DTYPE = "float32"
_PARQUET = (".parquet", ".parq", ".pq")
_SAMPLED_VALUES = 1 << 16  # of a column of arrays, whose lengths are compared


def locate_files(paths: Sequence[str], storage_options: Mapping[str, Any]) -> tuple[Store, tuple[str, ...]]:
    """One store that holds all the files or folders, paths or fsspec urls, and their names in it."""
    if not paths:
        raise InvalidInput("paths is empty: name a Parquet file or a folder.")
    stores = [_drop_dots(Store.open(path, **storage_options)) for path in paths]
    first = stores[0]
    for path, other in zip(paths, stores, strict=True):
        if other.filesystem != first.filesystem:
            raise InvalidInput(f"{path!r} and {paths[0]!r} lie in different file systems: read one alone.")
    common = posixpath.commonpath([store.root for store in stores])
    if _may_be_parquet(common) and first.filesystem.isfile(common):
        common = posixpath.dirname(common)
    return move_root(first, common), tuple(store.root[len(common) :].strip("/") for store in stores)


def move_root(store: Store, root: str) -> Store:
    return replace(store, url=store.url[: len(store.url) - len(store.root)] + root, root=root)


def _drop_dots(store: Store) -> Store:
    """A local store without `.` and `//` in its path, by which a file would have two names."""
    root = store.root
    if not store.is_local or ".." in root.split("/"):  # which links give another meaning
        return store
    return move_root(store, posixpath.normpath(root))


def describe_parquet(
    store: Store, columns: Sequence[str], names: Sequence[str] = ("",), **options: Any
) -> Manifest:
    """The Parquet files under the store's root, or under `names` in it, as a data set of `columns`. options: of
    `describe_files`."""
    _refuse_parts_of_tables(store, names)
    # A file that several of the names lead to is there once.
    found = {each.name: each for name in names for each in _parquet(store, name)}.values()
    files = [DataFile(each, partition_values(each.name), is_fixed=False) for each in found]
    return describe_files(store, files, columns, fields=_find_fields(store, names), **options)


def list_columns(store: Store, file: DataFile, names: Sequence[str] | None = None) -> list[str]:
    """The columns of a file, and of its path, of types that can be read. names: among these; None: all."""
    footer = FileFooter(store, file)
    known = [*footer.schema.names, *file.constants] if names is None else names
    types = footer.find_types(known)
    readable = {name for name in known if name in file.constants or _is_readable(types.get(name))}
    left = [name for name in known if name not in readable]
    if left:
        log.info("columns %s have types that cannot be read, such as maps: they are left out", left)
    return [name for name in known if name in readable]


def list_parquet_columns(store: Store, names: Sequence[str]) -> list[str]:
    """The columns of the first of these files or folders, as `list_columns`."""
    first = _parquet(store, names[0])[0]
    return list_columns(store, DataFile(first, partition_values(first.name), is_fixed=False))


def _is_readable(arrow: pa.DataType | None) -> bool:
    if arrow is None:
        return False
    return (
        _is_readable(arrow.value_type) if is_list(arrow) else is_vector(arrow) or dtype_of(arrow) is not None
    )


def find_data_files(
    urls: Sequence[str], columns: Sequence[str], storage_options: Mapping[str, Any]
) -> tuple[Store, tuple[DataFile, ...]]:
    """The Parquet files at these urls, as Spark writes them, and a store that holds all. columns: a path may have."""
    parts = [urlsplit(url) for url in urls]
    places = [(each.scheme or "file", each.netloc, unquote(each.path)) for each in parts]
    store, names = open_common(places, storage_options)
    # Folders of partitions may be many; the folders that hold these are few.
    roots = {re.split(r"(?:^|/)[^/]+=", posixpath.dirname(name))[0] for name in names}
    found = {each.name: each for root in roots for each in store.find(root)}
    files = []
    for name, (_, _, path) in zip(names, places, strict=True):
        if name not in found:
            raise StoreError(f"The store {store.url} has no {name!r}.")
        known = {key: value for key, value in partition_values(path).items() if key in columns}
        files.append(DataFile(found[name], known, is_fixed=False))
    return store, tuple(files)


Place = tuple[str, str, str]
"""Scheme, host or bucket, and path of a file."""


def open_common(
    places: Sequence[Place], storage_options: Mapping[str, Any], folder: Place | None = None
) -> tuple[Store, list[str]]:
    """One store that holds all files, and the folder if there is one, and the files' names in it."""
    systems = {each[:2] for each in [*places, *filter(None, [folder])]}
    if len(systems) > 1:
        shown = ", ".join(f"{scheme}://{host}" for scheme, host in sorted(systems))
        raise InvalidInput(
            f"The files lie in several file systems ({shown}), and a fit reads from one: write them again, to one."
        )
    ((scheme, host),) = systems
    folders = {posixpath.dirname(path) for _, _, path in places}
    common = posixpath.commonpath([*folders, *([] if folder is None else [folder[2]])])
    store = Store.open(common if scheme == "file" else f"{scheme}://{host}{common}", **storage_options)
    return store, [path[len(common) :].lstrip("/") for _, _, path in places]


def describe_files(  # noqa: PLR0913 - what callers know of the files
    store: Store,
    data_files: Sequence[DataFile],
    columns: Sequence[str],
    transformed: bool = False,
    piece_bytes: int = PIECE_BYTES,
    fields: Mapping[str, Field] = MappingProxyType({}),
    collect: CollectFooters = collect_footers_in_threads,
    where: Predicate | None = None,
) -> Manifest:
    """These files as a data set of `columns`. Row groups of more than twice `piece_bytes` when decoded are taken in
    pieces of that size. transformed: a transformation makes numbers of bytes, strings, dates and timestamps. fields:
    what petastorm says of columns. collect: reads the footers. where: which rows are taken."""
    names = list(dict.fromkeys(columns))
    read = list(data_files) if where is None else drop_excluded(data_files, where)
    files = _Files(store, read, collect(store, read, names, where))
    if not files.data:
        which = "" if where is None else " that match where"
        raise InvalidInput(f"The Parquet files in {store.url} have no rows{which}: nothing to train on.")
    described = tuple(_build_column(name, files, transformed, fields) for name in names)
    for column in described:
        _refuse_nulls(column.name, files)
    described = tuple(_take_ragged(column, files, transformed) for column in described)
    groups = _cut_groups(files, described, piece_bytes)
    seen = [each.info for each in read], list(groups.deleted.values())
    digest = hashlib.sha256(repr(seen).encode()).hexdigest()[:32]
    of_files = zip(files.data, files.facts, strict=True)
    columns_of = (FileColumns(file.constants, dict(facts.schema.stored_names)) for file, facts in of_files)
    known = reuse_equal(each.restrict(set(names)) for each in columns_of)
    is_fixed = all(each.is_fixed for each in read)
    states = () if is_fixed else tuple(each.info.state for each in files.data)
    paths = tuple(each.info.name for each in files.data)
    return Manifest(described, paths, groups, digest, digest, known, states)


def _is_number(text: str, kind: type[int] | type[float]) -> bool:
    with suppress(ValueError):
        number = kind(text)
        is_in_range = kind is float or -(2**63) <= number < 2**63
        return is_in_range and "_" not in text  # Python takes 2024_01 for a number, and Spark for a text
    return False


class _Files:
    """The files that have rows, and what their footers say. A file's number is its place."""

    def __init__(self, store: Store, data: Sequence[DataFile], facts: Sequence[FileFacts]) -> None:
        self.store = store
        self.facts = [each for each in facts if each.rows]
        self.data = []
        for file, known in zip(data, facts, strict=True):
            if known.rows:
                self.data.append(file if known.deleted is None else replace(file, deleted=known.deleted))
        self.rows = sum(each.rows for each in self.facts)
        # Of each row group with rows: they are listed file by file.
        groups = [each.groups for each in self.facts]
        counts = np.array([each.shape[1] for each in groups], np.int64)
        self.group_file = np.repeat(np.arange(len(groups)), counts)
        self.group_index, self.group_rows, self.group_bytes = np.concatenate(
            [np.zeros((3, 0), np.int64), *groups], axis=1
        )
        self._firsts: dict[FileSchema, int] = {}  # schema -> the number of the first file that has it
        for place, each in enumerate(self.facts):
            self._firsts.setdefault(each.schema, place)

    def first_rows(self, column: str, most: int = 1) -> pa.Array:
        return FileFooter(self.store, self.data[0]).first_rows(column, most)

    def find_type(self, column: str) -> pa.DataType | None:
        """The type in the files; None: no file has the column. Raises InvalidInput if it is not the same in all."""
        kinds: dict[pa.DataType, int] = {}  # type -> the number of the first file that has it
        for schema, place in self._firsts.items():
            kind = dict(schema.types).get(column)
            if kind is not None:
                kinds.setdefault(kind, place)
        if not kinds:
            return None
        (found, first), *others = kinds.items()
        declared = self.data[0].types.get(column)
        if declared is not None and others and all(_widens(kind, declared) for kind in kinds):
            # The table's type became a wider one, and the files that it had then were left as they are.
            found, others = declared, []
        for other, place in others:
            raise self._different_types(column, first, found, place, other)
        for place, facts in enumerate(self.facts):
            # Some files of a table may have a column of partitions in their paths alone.
            if column not in facts.nulls and column not in self.data[place].constants:
                raise self._different_types(column, first, found, place, None)
        return found

    def count_nulls(self, column: str) -> int:
        pairs = zip(self.data, self.facts, strict=True)
        absent = (
            (facts, facts.rows if file.constants.get(column) == NO_VALUE else 0) for file, facts in pairs
        )
        return sum(facts.nulls.get(column, rows) for facts, rows in absent)

    def _different_types(
        self, column: str, first: int, found: pa.DataType, place: int, other: pa.DataType | None
    ) -> InvalidInput:
        return InvalidInput(
            f"The column {column!r} is {found} in {self.data[first].info.name!r} and {other or 'missing'} in "
            f"{self.data[place].info.name!r}: write them alike."
        )


def _widens(stored: pa.DataType, declared: pa.DataType) -> bool:
    """Whether all values of a type in files are values of the table's, by the changes of types that Iceberg has."""
    for is_kind in (pa.types.is_signed_integer, pa.types.is_floating):
        if is_kind(stored) and is_kind(declared):
            return bool(stored.bit_width <= declared.bit_width)
    if pa.types.is_decimal(stored) and pa.types.is_decimal(declared):
        return bool(stored.scale == declared.scale and stored.precision <= declared.precision)
    if is_list(stored) and is_list(declared):
        return _widens(stored.value_type, declared.value_type)
    return bool(stored == declared)


def _parquet(store: Store, name: str) -> list[ObjectInfo]:
    """What Spark and others take for data: not names with _ or . in front, but for values of partitions, nor texts."""
    listed = store.find(name)
    _refuse_table_formats(store, name, listed)
    files = []
    for info in listed:
        parts = info.name[len(name) :].split("/")
        is_hidden = any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts)
        # Some clients list empty objects for folders.
        if _may_be_parquet(info.name) and (info.bytes or info.name.endswith(_PARQUET)) and not is_hidden:
            files.append(info)
    if not files:
        raise StoreError(f"There is no Parquet file under {store.join(name)}.")
    return files


def _may_be_parquet(name: str) -> bool:
    """By the name of a file: those of Hive, Athena and Flink have no suffix."""
    return name.endswith(_PARQUET) or "." not in posixpath.basename(name)


def _refuse_table_formats(store: Store, name: str, listed: Sequence[ObjectInfo]) -> None:
    """Their folders also hold files whose rows were deleted or updated; only the format's own log knows which."""
    for each in listed:
        *folders, file = each.name[len(name) :].split("/")
        kind = "delta" if "_delta_log" in folders else "hudi" if ".hoodie" in folders else None
        if folders[-1:] == ["metadata"] and ".metadata.json" in file:
            kind = "iceberg"
        if kind is not None:
            way = "fit(spark.read.format('hudi').load(...))" if kind == "hudi" else "fit_on_table"
            raise InvalidInput(
                f"{store.join(name)} holds a table of {kind}, whose files may have deleted rows: train with {way}."
            )


def _refuse_parts_of_tables(store: Store, names: Sequence[str]) -> None:
    """As the table's own folder, whose log lies above these names. What the store does not show counts as no log."""
    folders = {str(parent) for name in names for parent in PurePosixPath(store.path(name)).parents}
    for folder in sorted(folders - {"/", "."}):
        above = move_root(store, folder)
        with suppress(StoreError):
            if above.exists("_delta_log"):
                raise InvalidInput(
                    f"The paths lie in {above.url}, a table of delta, whose files may have deleted rows: train with "
                    "fit_on_table."
                )


def _find_fields(store: Store, names: Sequence[str]) -> dict[str, Field]:
    """What petastorm's schemas say of the columns, by name; nothing for files that petastorm did not write."""
    found = [find_unischema(store, name) for name in names]
    if any(fields != found[0] for fields in found):
        raise InvalidInput(
            f"The paths in {store.url} belong to petastorm data sets of different schemas: train on one at a time."
        )
    return found[0]


def _build_column(name: str, files: _Files, transformed: bool, fields: Mapping[str, Field]) -> Column:
    arrow = files.find_type(name)
    if arrow is None:
        return _partition_column(name, files, transformed)
    field = fields.get(name)
    if field is not None and field.codec_name:
        return describe_field(field, files.first_rows(name)[0].as_py())
    if is_vector(arrow):
        vector = files.first_rows(name)
        size = vector.field("size")[0].as_py()
        return Column(name, VECTOR_DTYPE, (size if size is not None else len(vector.field("values")[0]),))
    shape: list[int] = []
    values = files.first_rows(name) if is_list(arrow) else None
    while is_list(arrow):
        assert values is not None
        is_empty = not len(values) or not values[0].is_valid
        if is_empty or not (len(values[0]) or transformed):
            raise InvalidInput(f"The column {name!r} begins with an empty array or null: leave the row out.")
        shape.append(len(values[0]))
        values, arrow = values.flatten(), arrow.value_type
    dtype = _find_dtype(name, arrow, transformed)
    # petastorm keeps numbers in the next type that Parquet or Spark has: uint8 as int16.
    is_number = field is not None and np.dtype(dtype).kind in "biuf"
    return Column(name, (field.dtype if field and is_number else None) or dtype, tuple(shape))


def _find_dtype(name: str, arrow: pa.DataType, transformed: bool) -> str:
    dtype = dtype_of(arrow)
    if dtype is None or (Column(name, dtype).is_raw and not transformed):
        raise InvalidInput(
            f"The column {name!r} is {arrow}, which cannot be trained on: give numbers, booleans, arrays of them or "
            "ML vectors, or a transformation that makes numbers of it."
        )
    return dtype


def _partition_column(name: str, files: _Files, transformed: bool) -> Column:
    found = [file.constants.get(name) for file in files.data]
    if None in found:
        schema = files.facts[0].schema
        names = sorted({*(dict(schema.stored_names) or schema.names), *files.data[0].constants})
        raise InvalidInput(
            f"There is no column {name!r} in {files.store.url}: it has {format_columns(name, names)}."
        )
    _refuse_nulls(name, files)
    declared = files.data[0].types.get(name)
    if declared is not None and pa.types.is_binary(declared):
        raise InvalidInput(
            f"The column {name!r} is binary, and the table is partitioned by it: its log has such values as texts, "
            "whose form depends on who wrote them. Fit on a DataFrame, or on a column that is in the files."
        )
    if declared is not None:
        return Column(name, _find_dtype(name, declared, transformed))
    values = set(found)
    if {str(value).lower() for value in values} <= {"true", "false"}:
        return Column(name, "bool")
    for dtype, kind in (("int64", int), ("float64", float)):
        if all(_is_number(str(value), kind) for value in values):
            return Column(name, dtype)
    return Column(name, _find_dtype(name, pa.string(), transformed))


def _refuse_nulls(name: str, files: _Files) -> None:
    nulls = files.count_nulls(name)
    if nulls:
        told = f"The column {name!r} has {nulls} nulls in {files.rows} rows"
        raise InvalidInput(f"{told}: fill them, or leave those rows out.")


def _take_ragged(column: Column, files: _Files, transformed: bool) -> Column:
    """The column; if its arrays differ in length, as one that a transformation takes."""
    arrow = files.find_type(column.name)
    if arrow is None or not is_list(arrow) or column.codec:
        return column
    difference = _find_difference(column, files, transformed)
    if difference is None:
        return column
    if not transformed or len(column.shape) > 1:
        raise InvalidInput(
            f"The arrays of column {column.name!r} have different lengths: {difference}; "
            f"{format_remedy(len(column.shape))}."
        )
    return _make_ragged(column)


def align_ragged(one: Manifest, other: Manifest) -> Manifest:
    """The first, with those of its columns ragged that are so in the other: lengths may be the same by chance."""
    ragged = {column.name for column in other.columns if column.ragged}
    columns = []
    for column in one.columns:
        is_ragged = column.name in ragged and len(column.shape) == 1
        columns.append(_make_ragged(column) if is_ragged else column)
    return replace(one, columns=tuple(columns))


def _make_ragged(column: Column) -> Column:
    return replace(column, dtype="object", shape=(), ragged=column.dtype)


def _find_difference(column: Column, files: _Files, transformed: bool) -> str | None:
    """Where arrays of another length than the first are; None: nowhere. Judged by the values of each row group and,
    where others may be taken, by the first rows: lengths may add up by chance."""
    expected = math.prod(column.shape)
    if transformed and len(column.shape) == 1:
        lengths = count_elements(files.first_rows(column.name, 1 + _SAMPLED_VALUES // (1 + expected)))
        if not expected or (lengths != expected).any():
            return "the first rows show it"
    for file, facts in zip(files.data, files.facts, strict=True):
        values = facts.values[column.name]
        bad = np.flatnonzero(values != facts.groups[1] * expected).tolist()
        if bad and file.deleted is not None:  # the table may have no row of another length
            reads = transformed and len(column.shape) == 1
            bad = bad if reads and not FileFooter(files.store, file).has_length(column.name, expected) else []
        if bad:
            index, rows, _ = facts.groups[:, bad[0]]
            told = f"row group {index} of {file.info.name!r} has {values[bad[0]]} values in {rows} rows"
            return f"{told}, and the first row has shape {column.shape}"
    return None


def _cut_groups(files: _Files, columns: Sequence[Column], most: int) -> RowGroups:
    """The row groups of which the table has rows, the large ones in parts."""
    rows, size = files.group_rows, files.group_bytes
    ragged = [column for column in columns if column.ragged]
    if ragged:  # the bytes of decoded values, where these are more: numbers may be encoded in few bits
        sizes = [np.dtype(column.ragged).itemsize for column in ragged]
        values = [np.concatenate([facts.values[column.name] for facts in files.facts]) for column in ragged]
        size = np.maximum(size, sum(each * count for each, count in zip(sizes, values, strict=True)))
    decoded = compute_decoded_bytes(columns, rows, size)
    cut = (decoded > 2 * most) & (rows > 1)  # to cut costs a write and a read
    part_rows = np.where(cut, np.maximum(1, rows * most // np.maximum(1, decoded)), np.maximum(1, rows))
    parts = -(-rows // part_rows)
    source = np.repeat(np.arange(len(rows)), parts)
    place = np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = place * part_rows[source]
    count = np.minimum(part_rows[source], rows[source] - first)
    is_part = cut[source]
    groups = RowGroups(
        file=files.group_file[source],
        index=files.group_index[source],
        rows=count,
        bytes=np.where(is_part, size[source] * count // rows[source], size[source]),
        first_row=np.where(is_part, first, 0),
        parent_rows=np.where(is_part, rows[source], 0),
        part_rows=np.where(is_part, part_rows[source], 0),
    )
    if all(file.deleted is None for file in files.data):
        return groups
    # Row groups that have rows, in the order of the file: those of a file begin where the former ended.
    begins = np.cumsum(rows) - rows
    firsts = np.full(len(files.data), begins[-1])
    np.minimum.at(firsts, files.group_file, begins)
    return _drop_deleted(groups, files.data, begins[source] - firsts[groups.file] + first)


def _drop_deleted(groups: RowGroups, files: Sequence[DataFile], begins: Int64s) -> RowGroups:
    """Without the rows that the table has no more. begins: the row in its file that each group begins with."""
    rows, masks = groups.rows.copy(), {}
    for group in range(len(groups)):
        deleted = files[groups.file[group]].deleted
        if deleted is not None:
            mask = deleted[begins[group] : begins[group] + rows[group]]
            if mask.any():
                masks[group] = pack_deleted(mask)
                rows[group] -= int(mask.sum())
    return groups.keep(rows, masks)
