"""The tasks that put rows in the order of their hash, by Arrow: one sorts what a partition has, another merges a file.

A chunk is a file of sorted rows in the store: streams of Arrow, one for each range of hashes that has rows, then where
each range begins, and the number of ranges. Whoever merges a file reads the ranges that it needs of every chunk.
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

from spark_elastic.data.reading.decoding import CHECKSUMS
from spark_elastic.data.store import Store

CHUNK_BYTES = (
    64 << 20
)  # that a task sorts at a time; with its sorted copy and what it writes it holds three times that
RANGE_BYTES = 64 << 10  # of a range at least, and a kilobyte for each column, which a stream describes
MOST_RANGES = 1024
READS = 8  # chunks of which a task reads at the same time
ROW = (
    "row"  # the one column that tasks take and give: a struct of a row's columns, of any number and any names
)

Hashes = npt.NDArray[np.uint64]
Batches = Iterable[pa.RecordBatch]


def locate(hashes: Hashes, files: int) -> Hashes:
    """For each hash, the one of so many files in which it is, each for as large a range of hashes."""
    shift = np.uint64(32)
    return ((hashes >> shift) * np.uint64(files)) >> shift


@dataclass(frozen=True)
class SortTask:
    """Writes the rows of a partition as chunks. Gives the name of each, and whether its rows validate."""

    store: Store
    folder: str
    hash: str  # the column by which rows are sorted
    split: str | None  # the column that says which rows validate, if some do

    SCHEMA = "name string, validates boolean"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for rows in _join_batches(batches):
            marks = np.zeros(len(rows), bool) if self.split is None else _to_numpy(rows, self.split)
            hashes = _to_numpy(rows, self.hash).view(np.uint64)
            for validates in np.unique(marks).tolist():
                chosen = np.flatnonzero(marks == validates)
                order = chosen[np.argsort(hashes[chosen])]
                name = self._write(rows.take(pa.array(order)), hashes[order])
                yield pa.RecordBatch.from_pydict({"name": [name], "validates": [validates]})

    def _write(self, rows: pa.RecordBatch, hashes: Hashes) -> str:
        least = max(RANGE_BYTES, rows.num_columns << 10)
        ranges = int(np.clip(rows.nbytes // least, 1, MOST_RANGES))
        ends = np.searchsorted(locate(hashes, ranges), np.arange(ranges, dtype=np.uint64), side="right")
        out, begin, offsets = pa.BufferOutputStream(), 0, [0]
        for end in ends.tolist():
            if end > begin:
                with pa.ipc.new_stream(out, rows.schema) as writer:
                    writer.write_batch(rows.slice(begin, end - begin))
            offsets.append(out.tell())
            begin = end
        out.write(np.array([*offsets, ranges], np.int64).tobytes())
        name = f"{self.folder}/{uuid.uuid4().hex}.arrows"
        self.store.write_bytes(name, out.getvalue().to_pybytes(), durable=False)
        return name


def read_chunk(store: Store, name: str, number: int = 0, files: int = 1) -> Iterator[pa.RecordBatch]:
    """The ranges of a chunk in which there may be rows of that one of so many files."""
    tail = np.frombuffer(store.read_tail(name, 8 * (MOST_RANGES + 2))[-8:], np.int64)
    ranges = int(tail[0])
    offsets = np.frombuffer(store.read_tail(name, 8 * (ranges + 2)), np.int64)
    first, past = number * ranges // files, ((number + 1) * ranges - 1) // files + 1
    begin, end = int(offsets[first]), int(offsets[past])
    if begin == end:
        return
    source = pa.BufferReader(store.read_range(name, begin, end))
    while source.tell() < end - begin:
        yield from pa.ipc.open_stream(source)


@dataclass(frozen=True)
class ReadTask:
    """Gives the rows of chunks, by their numbers."""

    store: Store
    chunks: Sequence[str]
    hashes: tuple[str, str]  # columns: rows that are equal in both are equal
    # The column for the number of copies of a row in its chunk, which is then given once; None: rows as they are.
    copies: str | None

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            for rows in read_chunk(self.store, self.chunks[number]):
                yield _to_struct(rows if self.copies is None else self._count_copies(rows, self.copies))

    def _count_copies(self, rows: pa.RecordBatch, column: str) -> pa.RecordBatch:
        keys = [_to_numpy(rows, name) for name in self.hashes]
        changes = [np.diff(key, prepend=~key[0]) != 0 for key in keys]
        first = np.flatnonzero(np.logical_or(*changes))
        counts = pa.array(np.diff(first, append=len(rows)))
        found = rows.take(pa.array(first))
        return pa.RecordBatch.from_arrays([*found.columns, counts], [*found.schema.names, column])


@dataclass(frozen=True)
class MergeTask:
    """Writes files, by their numbers: first come those to train on. Gives the name of each;
    "": it has no rows."""

    store: Store
    folder: str
    chunks: Mapping[bool, Sequence[str]]  # whether their rows validate -> chunks
    files: Mapping[bool, int]  # whether their rows validate -> number of files
    hashes: tuple[str, str]  # columns by which rows are sorted
    columns: Sequence[str]  # columns that are written
    rows_per_group: int

    SCHEMA = "number long, name string"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            yield pa.RecordBatch.from_pydict({"number": [number], "name": [self.write(number)]})

    def write(self, number: int) -> str:
        """Write a file; returns its name."""
        validates = number >= self.files[False]
        files, place = self.files[validates], number - validates * self.files[False]

        def read(name: str) -> list[pa.RecordBatch]:
            return list(read_chunk(self.store, name, place, files))

        with ThreadPoolExecutor(READS) as pool:
            found = [batch for batches in pool.map(read, self.chunks[validates]) for batch in batches]
        if not found:
            return ""
        rows = _concatenate(found)
        order = self._sort(rows, place, files)
        if not len(order):
            return ""
        out = pa.BufferOutputStream()
        rows = rows.select(list(self.columns))
        with pq.ParquetWriter(
            out, rows.schema, version="2.6", compression="snappy", use_dictionary=False, **CHECKSUMS
        ) as writer:  # fmt: skip
            for begin in range(0, len(order), self.rows_per_group):
                group = rows.take(pa.array(order[begin : begin + self.rows_per_group]))
                writer.write_batch(group, row_group_size=self.rows_per_group)
        name = f"{self.folder}/part-{number:05d}-{uuid.uuid4().hex}.parquet"
        self.store.write_bytes(name, out.getvalue().to_pybytes(), durable=False)
        return name

    def _sort(self, rows: pa.RecordBatch, place: int, files: int) -> npt.NDArray[np.int64]:
        """The rows of that one of so many files, in order."""
        hashes, exact = (_to_numpy(rows, name) for name in self.hashes)
        chosen = np.flatnonzero(locate(hashes.view(np.uint64), files) == place)
        return chosen[np.lexsort((exact[chosen], hashes[chosen]))]


def _join_batches(batches: Batches) -> Iterator[pa.RecordBatch]:
    """The rows of structs, as columns, as many at a time as are to be sorted together."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(pa.RecordBatch.from_struct_array(batch.column(0)))
        size += batch.nbytes
        if size >= CHUNK_BYTES:
            yield _concatenate(waiting)
            waiting, size = [], 0
    if any(map(len, waiting)):
        yield _concatenate(waiting)


def _concatenate(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def _to_struct(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.StructArray.from_arrays(rows.columns, rows.schema.names)], [ROW])


def _to_numpy(rows: Any, name: str) -> Any:
    return rows.column(rows.schema.get_field_index(name)).to_numpy(zero_copy_only=False)
