"""What the footers of Parquet files say of the columns that are wanted.

Reads footers; counts nulls by reading a column where its footer does not say. Runs in threads of the driver, or in
tasks on executors, which send `FileFacts` back. Knows nothing of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_elastic.data.reading.decoding import (
    drop_views,
    is_list,
    is_vector,
    open_parquet,
    read_footer,
    to_plain_type,
)
from spark_elastic.data.store import ObjectInfo, Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.tables.predicate import Bounds, Comparison, Mask, Predicate, judge, match

Int64s = npt.NDArray[np.int64]

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # a constant that is null
THREADS = 16  # that wait for an object store at once
FILES_PER_THREAD = 64  # fewer files are read by one thread


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a table, and what is known of it beside its footer."""

    info: ObjectInfo  # the object in the store
    # Of columns: the text of the one value, which is not in the file; the name in the file, for all columns of tables
    # that map them ({}: their own); the id of the field in the file, for tables that know columns by ids; the names in
    # files whose fields have no ids ({}: their own); and the type in the table's schema, or else what the files say.
    constants: Mapping[str, str] = field(default_factory=dict)
    stored_names: Mapping[str, str] = field(default_factory=dict)
    field_ids: Mapping[str, int] = field(default_factory=dict)
    mapped_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    deleted: Mask | None = None  # of each row in the file, whether the table has it no more; None: it has all
    is_fixed: bool = True  # nobody writes a file of this name again, as in tables whose log names files

    def find_mapped_names(self, names: Container[str]) -> dict[str, str]:
        """Column -> its name in a file that has these names and no ids of fields, for the columns that are in it."""
        mapped = self.mapped_names or {column: (column,) for column in self.field_ids}
        found = {column: [name for name in own if name in names] for column, own in mapped.items()}
        return {column: own[0] for column, own in found.items() if own}

    def rename_columns(self, columns: Mapping[str, str]) -> DataFile:
        """The file with these columns alone. columns: name of a column -> the name that it has here."""
        known: dict[str, Any] = {}
        for field_name in ("constants", "types", "field_ids", "mapped_names"):
            values = getattr(self, field_name)
            known[field_name] = {name: values[own] for name, own in columns.items() if own in values}
        if not self.field_ids:
            known["stored_names"] = {name: self.stored_names.get(own, own) for name, own in columns.items()}
        return replace(self, **known)


@dataclass(frozen=True)
class FileSchema:
    """What files have in common."""

    names: tuple[str, ...]  # the names of all columns in the file
    types: tuple[tuple[str, pa.DataType], ...]  # (wanted column, its type), of those that are in the file
    stored_names: tuple[tuple[str, str], ...]  # (column, its name in the file); (): their own


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the footer of a file says, and the columns that `where` compares."""

    schema: FileSchema  # what the file has in common with others
    rows: int  # the rows that the table has of it
    # (3, n): of each row group with rows, its number in the file, its rows there, deleted ones among them, and its
    # bytes before compression.
    groups: Int64s
    nulls: Mapping[str, int]  # wanted column -> its nulls; those that are not in the file are not in here
    values: Mapping[str, Int64s]  # wanted column of arrays -> its numbers in each row group, deleted or not
    deleted: Mask | None  # of each row in the file, whether it is not taken; None: as the table says


CollectFooters = Callable[[Store, Sequence[DataFile], Sequence[str], Predicate | None], list[FileFacts]]


def collect_footers(
    store: Store, files: Sequence[DataFile], columns: Sequence[str], where: Predicate | None = None
) -> list[FileFacts]:
    """Read the footers in the calling thread, and the columns that `where` compares."""
    schemas: dict[FileSchema, FileSchema] = {}
    found = (FileFooter(store, data).describe(columns, where) for data in files)
    return [replace(each, schema=schemas.setdefault(each.schema, each.schema)) for each in found]


def collect_footers_in_threads(
    store: Store, files: Sequence[DataFile], columns: Sequence[str], where: Predicate | None = None
) -> list[FileFacts]:
    """As `collect_footers`, with threads if there are many files."""
    parts = [files[start : start + FILES_PER_THREAD] for start in range(0, len(files), FILES_PER_THREAD)]
    if len(parts) < 2:
        return collect_footers(store, files, columns, where)
    with ThreadPoolExecutor(THREADS, "footers") as threads:
        found = threads.map(lambda part: collect_footers(store, part, columns, where), parts)
        return list(chain.from_iterable(found))


class FileFooter:
    """One file's footer, and what it says of columns."""

    def __init__(self, store: Store, data: DataFile) -> None:
        self.store, self.name, self.data = store, data.info.name, data
        self.footer: pq.FileMetaData = read_footer(store, self.name)
        self.groups = [self.footer.row_group(index) for index in range(self.footer.num_row_groups)]
        self.schema: pa.Schema = self.footer.schema.to_arrow_schema()
        self.stored_names = {**data.stored_names, **self._find_by_id(data.field_ids)}
        if data.deleted is not None and len(data.deleted) != self.footer.num_rows:
            raise StoreError(
                f"{self.name!r} in the store {store.url} has {self.footer.num_rows} rows, of which its table has "
                f"deleted some among {len(data.deleted)}: the table is damaged."
            )
        self.rows = self.footer.num_rows - (0 if data.deleted is None else int(data.deleted.sum()))

    def describe(self, columns: Sequence[str], where: Predicate | None) -> FileFacts:
        types = self.find_types(columns)
        stored_names = tuple(self.stored_names.items())
        schema = FileSchema(tuple(self.schema.names), tuple(types.items()), stored_names)
        given = self.data.deleted
        if where is not None:
            self.keep_matching(where)
        sizes = [(n, group.num_rows, group.total_byte_size) for n, group in enumerate(self.groups)]
        groups = np.array([each for each in sizes if each[1]], np.int64).reshape(-1, 3).T
        nulls = {name: self.count_nulls(name) for name in types}
        values = {name: self.count_values(name, groups[0]) for name in types if is_list(types[name])}
        deleted = None if self.data.deleted is given else self.data.deleted
        return FileFacts(schema, self.rows, groups, nulls, values, deleted)

    def _find_by_id(self, ids: Mapping[str, int]) -> dict[str, str]:
        """Column -> its name in the file, by the ids in the file's schema, or else by the table's mapping of names."""
        names = find_field_names(self.schema) if ids else {}
        # A column that came after the file is not in it, even if an older one had its name.
        found = {name: names.get(number, f"(no field {number})") for name, number in ids.items()}
        if names:
            return found
        return found | self.data.find_mapped_names(self.schema.names) if self.data.mapped_names else {}

    def find_stored_name(self, column: str) -> str:
        return self.stored_names.get(column, column)

    def find_types(self, columns: Sequence[str]) -> dict[str, pa.DataType]:
        found = {column: self.find_type(column) for column in columns}
        return {column: kind for column, kind in found.items() if kind is not None}

    def find_type(self, column: str) -> pa.DataType | None:
        """The plain type; None: the column is not in the file. A table that gives names knows all columns of a file."""
        name, known = self.find_stored_name(column), self.stored_names
        if name not in self.schema.names or (known and column not in known):
            return None
        return to_plain_type(self.schema.field(name).type)

    def keep_matching(self, where: Predicate) -> None:
        """Count the other rows among those that the table has no more."""
        rows = [group.num_rows for group in self.groups]
        bounds = {name: self._find_bounds(name) for name in where.columns}
        judged = where.combine(lambda comparison: judge(bounds[comparison[0]], comparison))
        masks = []
        with self._open() as file:
            for index, (count, may_match, match_all) in enumerate(zip(rows, *judged, strict=True)):
                if count and may_match and not match_all:
                    known = {name: each.slice(index) for name, each in bounds.items()}
                    masks.append(self._match(where, file, index, known))
                else:
                    masks.append(np.full(count, match_all))
        left_out = ~np.concatenate([np.ones(0, np.bool_), *masks])
        if left_out.any():
            before = self.data.deleted
            deleted = left_out if before is None else left_out | before
            self.data, self.rows = replace(self.data, deleted=deleted), int(np.sum(~deleted))

    def _match(
        self, where: Predicate, file: pq.ParquetFile, index: int, bounds: Mapping[str, Bounds]
    ) -> Mask:
        """Of each row of a row group, whether it matches; looks at values only where bounds do not tell."""

        def decide(comparison: Comparison) -> Mask:
            name = comparison[0]
            may_match, match_all = judge(bounds[name], comparison)
            if may_match == match_all:
                return np.asarray(match_all)
            stored = self.find_stored_name(name)
            found = file.read_row_group(index, columns=[stored], use_threads=False)
            return match(drop_views(pa.concat_arrays(found[stored].chunks)), comparison)

        return where.combine(decide)

    def _find_bounds(self, column: str) -> Bounds:
        groups, kind = self.groups, self.find_type(column)
        if kind is None and column not in self.data.types:
            raise InvalidInput(
                f"where compares column {column!r}, which is missing in {self.name!r}: compare one that all files have."
            )
        if kind is None:
            text = self.data.constants.get(column)
            if text is None:  # the table got the column after this file
                return _make_constant_bounds([NO_VALUE] * len(groups), pa.string())
            return _make_constant_bounds([text] * len(groups), self.data.types[column])
        stored, leaf = self.schema.field(self.find_stored_name(column)).type, self.find_leaf(column)
        kind = stored if pa.types.is_timestamp(stored) else kind
        found = [group.column(leaf).statistics for group in groups]
        ranges = [_read_range(each, kind) for each in found]
        nulls = [each.null_count if each is not None and each.has_null_count else -1 for each in found]
        low, high = (pa.array([each[end] for each in ranges], kind) for end in (0, 1))
        is_null = (np.array(nulls) == [group.num_rows for group in groups]) | pa.types.is_null(kind)
        return Bounds(low, high, is_null, np.array(nulls) != 0, pa.types.is_floating(kind))

    def find_leaf(self, column: str) -> int:
        """The number of the stored column that tells of a column's nulls and length: its last, a vector's first."""
        leaves, name = 0, self.find_stored_name(column)
        for each in self.schema:
            width = _count_leaves(each.type)
            if each.name == name:
                return leaves if is_vector(each.type) else leaves + width - 1
            leaves += width
        raise KeyError(name)

    def first_rows(self, column: str, most: int = 1) -> pa.Array:
        """One row of a column, or some, without reading a whole row group."""
        return next(batch for batch in self._read(column, most, 1 << 16) if len(batch))

    def has_length(self, column: str, length: int) -> bool:
        """Whether all arrays of a column that the table has are that long; reads the column."""
        return all(np.all(count_elements(batch) == length) for batch in self._read(column, 1 << 12, 1 << 20))

    def count_values(self, column: str, groups: Int64s) -> Int64s:
        """The numbers of an array column in each of these row groups."""
        leaf, counts = self.find_leaf(column), []
        for group in groups.tolist():
            chunk = self.groups[group].column(leaf)
            known = chunk.statistics
            # Parquet has a value for an empty array as well, and counts it among the nulls.
            counts.append(chunk.num_values - (known.null_count if known and known.has_null_count else 0))
        return np.array(counts, np.int64)

    def count_nulls(self, name: str) -> int:
        """How many nulls a column has, at any depth: by the footer, or by reading the column."""
        leaf, total = self.find_leaf(name), 0
        if not self.footer.schema.column(leaf).max_definition_level:
            return 0
        for group in self.groups:
            statistics = group.column(leaf).statistics
            if statistics is None or not statistics.has_null_count:
                return self._read_nulls(name)
            total += statistics.null_count
        # They may be in rows that the table has no more, or empty arrays.
        is_array = is_list(self.schema.field(self.find_stored_name(name)).type)
        return self._read_nulls(name) if total and (is_array or self.data.deleted is not None) else total

    def _read(self, column: str, rows: int, buffer_size: int) -> Iterator[pa.Array]:
        """The rows of a column that the table has, by so many in the file."""
        with self._open(buffer_size) as file:
            begin, name = 0, self.find_stored_name(column)
            for batch in file.iter_batches(rows, columns=[name], use_threads=False):
                # Not the first one: by a name with a dot, Arrow reads the field of a struct as well.
                values, end = drop_views(batch[name]), begin + batch.num_rows
                if self.data.deleted is not None:
                    values = values.filter(pa.array(~self.data.deleted[begin:end]))
                yield values
                begin = end

    @contextmanager
    def _open(self, buffer_size: int = 0) -> Iterator[pq.ParquetFile]:
        try:
            with self.store.open_read(self.name) as source:
                yield open_parquet(source, buffer_size=buffer_size)
        except (pa.ArrowException, OSError) as error:
            raise StoreError(
                f"{self.name!r} in the store {self.store.url} cannot be read: {' '.join(str(error).split())}"
            ) from error

    def _read_nulls(self, name: str) -> int:
        total = 0
        for values in self._read(name, 1 << 16, 1 << 20):
            total += values.null_count
            while is_list(values.type):
                values = values.flatten()
                total += values.null_count
        return total


def drop_excluded(files: Sequence[DataFile], where: Predicate) -> list[DataFile]:
    """The files without those of which no row matches, by what is known without a look into them."""

    def decide(comparison: Comparison) -> Mask:
        column = comparison[0]
        kind, texts = files[0].types.get(column), [file.constants.get(column) for file in files]
        if kind is None or texts.count(None) == len(texts):
            return np.array([[True], [False]])
        return judge(_make_constant_bounds(texts, kind), comparison)

    may_match = np.broadcast_to(where.combine(decide)[0], len(files)) if files else ()
    return [file for file, is_kept in zip(files, may_match, strict=True) if is_kept]


def _make_constant_bounds(texts: Sequence[str | None], kind: pa.DataType) -> Bounds:
    """The bounds of parts in which a column has one value. texts: as in `DataFile.constants`; None: not known."""
    if pa.types.is_binary(kind):
        raise InvalidInput(
            "where compares a partition column of bytes, which the table has as texts, whose form depends on who wrote "
            "them: compare another column."
        )
    values = pa.array([None if text == NO_VALUE else text for text in texts], pa.string()).cast(kind)
    is_null = np.array([text == NO_VALUE for text in texts], np.bool_)
    return Bounds(values, values, is_null, is_null, may_be_nan=False)


def _read_range(statistics: Any, kind: pa.DataType) -> tuple[Any, Any]:
    """The least and the greatest value of a row group, as its statistics have them; (None, None): not known."""
    # Of times and float16 Arrow gives other values than it reads.
    tests = pa.types.is_nested, pa.types.is_time, pa.types.is_float16
    is_unclear = any(test(kind) for test in tests) or isinstance(kind, pa.BaseExtensionType)
    if statistics is None or is_unclear:
        return None, None
    try:
        low, high = statistics.min, statistics.max
    except (OverflowError, ValueError):  # times that Python does not have
        return None, None
    # Writers that count NaN among the values leave no bounds of the others.
    return (low, high) if low == low and high == high else (None, None)


def find_field_names(schema: pa.Schema) -> dict[int, str]:
    """Id of a field in the file's schema -> its name."""
    fields = ((each.name, (each.metadata or {}).get(b"PARQUET:field_id")) for each in schema)
    return {int(number): name for name, number in fields if number is not None}


def count_elements(values: pa.Array) -> Int64s:
    return np.asarray(pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


def _count_leaves(arrow: pa.DataType) -> int:
    if pa.types.is_struct(arrow):
        return sum(_count_leaves(field.type) for field in arrow)
    if pa.types.is_map(arrow):
        return _count_leaves(arrow.key_type) + _count_leaves(arrow.item_type)
    return _count_leaves(arrow.value_type) if is_list(arrow) else 1
