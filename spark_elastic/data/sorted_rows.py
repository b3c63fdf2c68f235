"""The tasks that put rows in the order of their hash, by Arrow: one sorts what a partition has, one makes the copies of
rows that a table has often, one merges a file.

A chunk is a file of sorted rows in the store: a stream of Arrow with a batch for each range of hashes, then where each
batch begins, and the number of ranges. Whoever merges a file reads the ranges that it needs of every chunk. Where many
rows are copies of others, a chunk has each once, and their number.
Runs in Python workers of Spark's executors, and in the driver for small tables.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column
from spark_elastic.data.reading.decoding import CHECKSUMS, decode_columns, join_batches
from spark_elastic.data.store import Store

CHUNK_BYTES = 64 << 20  # that a task sorts at a time; with copies of them it holds three times that
RANGE_BYTES = 64 << 10  # of a range at least, and a kilobyte for each column, which a batch describes
MOST_RANGES = 1024
READS = 8  # chunks of which a task reads at the same time
ROW = "row"  # the one column that tasks take and give: a struct of columns of any number and any names
COPIES = "__spark_elastic_copies"  # the last column of a chunk: how often a row is there
# With a smaller share of distinct rows, a chunk has each once, and copies of a row are spread over the table; else they
# lie side by side.
DISTINCT = 0.9
SMALLEST = 2500  # hashes of each chunk that are kept to estimate how many rows differ: an error of 2 %

Hashes = npt.NDArray[np.uint64]
Batches = Iterable[pa.RecordBatch]
Columns = Mapping[str, npt.NDArray[np.int64]]
Chunks = Mapping[bool, Sequence[str]]  # whether their rows validate -> names


# Primes of xxHash64, which Spark calls `xxhash64`. The hash of one value is the seed of the next.
_P1, _P2, _P3, _P4, _P5 = np.array(
    [0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5],
    np.uint64,
)


def hash_further(hashes: Hashes, values: npt.NDArray[np.int64]) -> Hashes:
    """Spark's hashes of rows with one more long behind the others."""
    mixed, words = hashes + _P5 + np.uint64(8), values.view(np.uint64)
    return _finish(_rotate(mixed ^ _rotate(words * _P2, 31) * _P1, 27) * _P1 + _P4)


def _rotate(hashes: Hashes, bits: int) -> Hashes:
    return hashes << np.uint64(bits) | hashes >> np.uint64(64 - bits)


def _finish(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ hashes >> np.uint64(33)) * _P2
    hashes = (hashes ^ hashes >> np.uint64(29)) * _P3
    return hashes ^ hashes >> np.uint64(32)


def normalize(values: pa.Array) -> pa.Array:
    """The same values, with 0.0 for -0.0 and one NaN for all: rows that are equal in their hashes are then equal."""
    if pa.types.is_list(values.type):
        return pa.ListArray.from_arrays(values.offsets, normalize(values.values), type=values.type)
    if not pa.types.is_floating(values.type):
        return values
    numbers = values.to_numpy(zero_copy_only=False) + values.type.to_pandas_dtype()(0)
    return pa.array(np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers))


def store_rows(rows: pa.RecordBatch, columns: Sequence[Column]) -> pa.RecordBatch:
    """These columns as files have them. Arrays of numbers of one shape become their bytes, which are read in a quarter
    of the time that lists take. The schema says which others have nulls: where there are none, Parquet stores for no
    value that it is there, and is read in three quarters of the time."""
    fields, arrays = [], []
    for column in columns:
        values = rows.column(rows.schema.get_field_index(column.name))
        if column.shape and np.dtype(column.dtype).kind in "iuf":
            numbers = decode_columns({column.name: values}, len(rows), (column,), {})[column.name]
            values = pa.Array.from_buffers(
                pa.binary(column.row_bytes), len(rows), [None, pa.py_buffer(numbers)]
            )
        elif pa.types.is_list(values.type) and not values.values.null_count:
            kind = pa.list_(values.type.value_field.with_nullable(False))
            shape = len(values), values.buffers()[:2], values.null_count, values.offset
            values = pa.Array.from_buffers(kind, *shape, [values.values])
        fields.append(pa.field(column.name, values.type, nullable=values.null_count > 0))
        arrays.append(values)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def locate(hashes: Hashes, files: int) -> Hashes:
    """For each hash, the one of so many files in which it is, each for as large a range of hashes."""
    shift = np.uint64(32)
    return ((hashes >> shift) * np.uint64(files)) >> shift


def estimate_distinct(smallest: Iterable[bytes]) -> int:
    """About how many rows differ, by the `SMALLEST` hashes of chunks: the same number for the same rows."""
    found = np.unique(np.frombuffer(b"".join(smallest), np.uint64))[:SMALLEST]
    return len(found) if len(found) < SMALLEST else int((SMALLEST - 1) * 2**64 / int(found[-1]))


@dataclass(frozen=True)
class SortTask:
    """Writes the rows of a partition as chunks. Gives the name of each, whether its rows validate, the copies of that
    row of which it has most, and its smallest hashes."""

    store: Store
    folder: str
    hashes: tuple[str, str]  # columns: rows are sorted by the first; those that are equal in both are equal
    split: str | None = None  # the column that says which rows validate, if some do

    SCHEMA = "name string, validates boolean, most long, smallest binary"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for rows in _join_batches(batches):
            marks = np.zeros(len(rows), bool) if self.split is None else _to_numpy(rows, self.split)
            for validates in np.unique(marks).tolist():
                yield self._write(rows, np.flatnonzero(marks == validates), validates)

    def _write(self, rows: pa.RecordBatch, chosen: npt.NDArray[np.int64], validates: bool) -> pa.RecordBatch:
        hashes, exact = (_to_numpy(rows, name) for name in self.hashes)
        order = chosen[np.argsort(hashes[chosen].view(np.uint64))]
        first = np.flatnonzero(_find_changes(hashes[order]))
        smallest = hashes[order[first[:SMALLEST]]].tobytes()
        counts = np.diff(first, append=len(order))
        # Rows may be equal in the first hash alone.
        alike = exact[order] == np.repeat(exact[order[first]], counts)
        if len(first) >= DISTINCT * len(order) or not alike.all():
            first, counts = np.arange(len(order)), np.ones_like(order)
        return self.write_sorted(rows.take(_to_arrow(order[first])), {COPIES: counts}, validates, smallest)

    def write_sorted(
        self, rows: pa.RecordBatch, added: Columns, validates: bool, smallest: bytes = b""
    ) -> pa.RecordBatch:
        """Write a chunk. added: columns that the rows lack."""
        arrays = [*rows.columns, *map(_to_arrow, added.values())]
        schema = pa.schema([*rows.schema, *(pa.field(name, pa.int64()) for name in added)])
        rows, most = pa.RecordBatch.from_arrays(arrays, schema=schema), int(added[COPIES].max())
        least = max(RANGE_BYTES, rows.num_columns << 10)
        ranges = int(np.clip(rows.nbytes // least, 1, MOST_RANGES))
        hashes = _to_numpy(rows, self.hashes[0]).view(np.uint64)
        ends = np.searchsorted(locate(hashes, ranges), np.arange(ranges, dtype=np.uint64), side="right")
        out, begin = pa.BufferOutputStream(), 0
        with pa.ipc.new_stream(out, rows.schema) as writer:
            writer.write_batch(rows.slice(0, 0))  # and the schema before it
            offsets = [out.tell()]
            for end in ends.tolist():
                if end > begin:
                    writer.write_batch(rows.slice(begin, end - begin))
                offsets.append(out.tell())
                begin = end
        out.write(np.array([*offsets, ranges], np.int64).tobytes())
        name = f"{self.folder}/{uuid.uuid4().hex}.arrows"
        self.store.write_bytes(name, memoryview(out.getvalue()), durable=False)
        described = {
            "name": _to_binary(name.encode()).cast(pa.string()),
            "validates": _to_arrow(np.array([validates], np.int64)).cast(pa.bool_()),
            "most": _to_arrow(np.array([most])),
            "smallest": _to_binary(smallest),
        }
        return pa.RecordBatch.from_arrays([*described.values()], [*described])


def read_chunk(store: Store, name: str, number: int = 0, files: int = 1) -> Iterator[pa.RecordBatch]:
    """The ranges of a chunk in which there may be rows of that one of so many files."""
    tail = store.read_tail(name, 8 * (MOST_RANGES + 2))
    numbers = np.frombuffer(tail[len(tail) % 8 :], np.int64).tolist()
    ranges = numbers.pop()
    offsets = numbers[-ranges - 1 :]
    begin, end = offsets[number * ranges // files], offsets[((number + 1) * ranges - 1) // files + 1]
    if begin == end:
        return
    schema = pa.ipc.read_schema(pa.py_buffer(store.read_range(name, 0, offsets[0])))
    source = pa.BufferReader(store.read_range(name, begin, end))
    while source.tell() < end - begin:
        yield pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)


@dataclass(frozen=True)
class ReadTask:
    """Gives the rows of chunks, by their numbers."""

    store: Store
    chunks: Sequence[str]

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for number in _iter_numbers(batches):
            for rows in read_chunk(self.store, self.chunks[number]):
                every = np.repeat(np.arange(len(rows)), _to_numpy(rows, COPIES))
                found = rows.select(rows.schema.names[:-1]).take(_to_arrow(every))
                yield pa.RecordBatch.from_arrays([found.to_struct_array()], [ROW])


@dataclass(frozen=True)
class CopyTask:
    """Numbers the copies of each row and writes them as chunks, by a hash of row and number; gives what `SortTask`
    does. A task takes a range of hashes, and a share of each row's copies; first come rows to train on."""

    sort: SortTask
    chunks: Chunks
    columns: Sequence[str]  # columns that are hashed
    ranges: int
    shares: int  # in which the copies of each row are divided

    SCHEMA = SortTask.SCHEMA

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for number in _iter_numbers(batches):
            validates, task = divmod(number, self.ranges * self.shares)
            yield from self.write(bool(validates), *divmod(task, self.shares))

    def write(self, validates: bool, number: int, share: int) -> Iterator[pa.RecordBatch]:
        found, order = _read_sorted(self.sort, self.chunks[validates], number, self.ranges)
        if found is None:
            return
        hashes, exact, counts = (_to_numpy(found, name)[order] for name in (*self.sort.hashes, COPIES))
        first = np.flatnonzero(_find_changes(hashes) | _find_changes(exact))
        # How many copies of each row, and of those before it, the share has
        ends = np.cumsum(np.maximum(0, -((share - np.add.reduceat(counts, first)) // self.shares)))
        begins = np.concatenate([[0], ends[:-1]])
        rows = found.select(list(self.columns)).take(_to_arrow(order[first]))
        rows = pa.RecordBatch.from_arrays([normalize(column) for column in rows.columns], schema=rows.schema)
        step = max(1, CHUNK_BYTES * len(rows) // (rows.nbytes + 16 * len(rows)))
        for begin in range(0, int(ends[-1]), step):
            every = np.arange(begin, min(begin + step, ends[-1]))
            places = np.searchsorted(ends, every, side="right")
            numbers = (every - begins[places]) * self.shares + share
            names = self.sort.hashes
            keys = [hash_further(key[first][places].view(np.uint64), numbers) for key in (hashes, exact)]
            order = np.argsort(keys[0])
            added = {name: key[order].view(np.int64) for name, key in zip(names, keys, strict=True)}
            added[COPIES] = np.ones_like(order)
            yield self.sort.write_sorted(rows.take(_to_arrow(places[order])), added, validates)


@dataclass(frozen=True)
class MergeTask:
    """Writes files, by their numbers: first come those to train on. Gives the name of each; "": it has no rows."""

    sort: SortTask  # by which the chunks were written
    folder: str
    chunks: Chunks
    files: Mapping[bool, int]  # whether their rows validate -> number of files
    columns: Sequence[Column]  # that are written
    rows_per_group: int

    SCHEMA = "number long, name string"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for number in _iter_numbers(batches):
            name = _to_binary(self.write(number).encode()).cast(pa.string())
            yield pa.RecordBatch.from_arrays([_to_arrow(np.array([number])), name], ["number", "name"])

    def write(self, number: int) -> str:
        validates = number >= self.files[False]
        files, place = self.files[validates], number - validates * self.files[False]
        found, order = _read_sorted(self.sort, self.chunks[validates], place, files)
        if found is None:
            return ""
        order = np.repeat(order, _to_numpy(found, COPIES)[order])
        out = pa.BufferOutputStream()
        rows = store_rows(found, self.columns)
        options = {"version": "2.6", "compression": "snappy", "use_dictionary": False, **CHECKSUMS}
        with pq.ParquetWriter(out, rows.schema, **options) as writer:
            for begin in range(0, len(order), self.rows_per_group):
                group = rows.take(_to_arrow(order[begin : begin + self.rows_per_group]))
                writer.write_batch(group, row_group_size=self.rows_per_group)
        name = f"{self.folder}/part-{number:05d}-{uuid.uuid4().hex}.parquet"
        self.sort.store.write_bytes(name, memoryview(out.getvalue()), durable=False)
        return name


def _join_batches(batches: Batches) -> Iterator[pa.RecordBatch]:
    """The rows of structs, as columns, as many at a time as are to be sorted together."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(pa.RecordBatch.from_struct_array(batch.column(0)))
        size += batch.nbytes
        if size >= CHUNK_BYTES:
            yield join_batches(waiting)
            waiting, size = [], 0
    if any(map(len, waiting)):
        yield join_batches(waiting)


def _iter_numbers(batches: Batches) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _read_sorted(
    sort: SortTask, names: Sequence[str], number: int, files: int
) -> tuple[pa.RecordBatch | None, npt.NDArray[np.int64]]:
    """Rows of chunks, and the places of those of that one of so many files, in order; None: there are none."""

    def read(name: str) -> list[pa.RecordBatch]:
        return list(read_chunk(sort.store, name, number, files))

    with ThreadPoolExecutor(READS) as pool:
        found = [rows for batches in pool.map(read, names) for rows in batches]
    if not found:
        return None, np.array([], np.int64)
    rows = join_batches(found)
    hashes, exact = (_to_numpy(rows, name) for name in sort.hashes)
    order = _sort_range(hashes.view(np.uint64), exact, number, files)
    return rows if len(order) else None, order


def _sort_range(hashes: Hashes, exact: Any, number: int, files: int) -> npt.NDArray[np.int64]:
    """The places of the hashes of that one of so many files, in order. exact: the order among equal hashes."""
    chosen = np.flatnonzero(locate(hashes, files) == number)
    keys = hashes[chosen].view(np.int64)
    order = np.argsort(keys)
    if not _find_changes(keys[order]).all():  # some are equal; that order costs five times as much
        order = np.lexsort((exact[chosen], keys))
    return chosen[order]


def _find_changes(keys: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    changes: npt.NDArray[np.bool_] = np.diff(keys, prepend=~keys[:1]) != 0
    return changes


# ---- `pa.array`, `pa.scalar` and `to_numpy` import pandas, which takes a new Python worker of Spark's half a second


def _to_numpy(rows: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    """The numbers or flags of a column of some rows, none of which is null."""
    numbers = rows.column(rows.schema.get_field_index(name)).cast(pa.int64())
    return np.frombuffer(numbers.buffers()[1], np.int64, len(numbers), 8 * numbers.offset)


def _to_arrow(numbers: npt.NDArray[np.int64]) -> pa.Array:
    return pa.Array.from_buffers(
        pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))]
    )


def _to_binary(value: bytes) -> pa.Array:
    """An array of this value alone."""
    return pa.Array.from_buffers(
        pa.binary(), 1, [None, pa.py_buffer(np.array([0, len(value)], np.int32)), pa.py_buffer(value)]
    )
