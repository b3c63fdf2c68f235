"""What readers have in common: which columns, the decoded row groups that they keep, opening and closing.

Knows no format. Any thread may fetch; one decodes at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column, Manifest, RowGroup
from spark_elastic.data.reading.decoding import ColumnArrays, decode_columns, open_parquet, partition_values
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES, RowGroupCache
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError

_STREAMED = 1 << 20  # bytes of a column that are read at a time


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SplitGroupCache:
    """Row groups in pieces, by key. Before one more is cut, those that were not used for longest go until the disk has
    as much left as they take: other workers cut on it, too."""

    def __init__(self) -> None:
        self._held: OrderedDict[Hashable, SplitRowGroup] = OrderedDict()

    def get(self, key: Hashable, cut: Callable[[], SplitRowGroup]) -> SplitRowGroup:
        """cut: makes the pieces if they are not there, or no longer."""
        if key not in self._held:
            self._make_room()
            self._held[key] = cut()
        self._held.move_to_end(key)
        return self._held[key]

    def close(self) -> None:
        """Drop all pieces."""
        while self._held:
            self._drop_oldest()

    def _make_room(self) -> None:
        while self._held and self._bytes() > shutil.disk_usage(tempfile.gettempdir()).free:
            self._drop_oldest()

    def _bytes(self) -> int:
        return sum(each.bytes for each in self._held.values())

    def _drop_oldest(self) -> None:
        self._held.popitem(last=False)[1].close()


class SplitRowGroup:
    """The rows of one row group in pieces of `rows` rows (the last may have fewer); a part at a time is in memory."""

    def __init__(self, source: Any, index: int, columns: Sequence[str], rows: int) -> None:
        """source: an open Parquet file, read once from beginning to end and left open. bytes: what they take.

        Raises:
            StoreError: the disk is full.
        """
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._cut(source, index, list(columns), rows)
            self.bytes = self._file.seek(0, os.SEEK_END)
            self._reader = pa.ipc.open_file(self._file)
        except BaseException as error:
            with suppress(OSError):  # it writes what is left, for which there is no room either
                self._file.close()
            if isinstance(error, OSError) and error.errno in _FULL:
                raise StoreError(
                    f"A row group too large for memory could not be cut in {tempfile.gettempdir()} "
                    f"({error.strerror}): set TMPDIR to a folder with more room, or write smaller row groups."
                ) from error
            raise

    def read(self, number: int) -> pa.RecordBatch:
        """A piece, in memory of its own."""
        return self._reader.get_batch(number)

    def close(self) -> None:
        """Drop the pieces."""
        self._file.close()

    def _cut(self, source: Any, index: int, columns: list[str], rows: int) -> None:
        file = open_parquet(source, buffer_size=_STREAMED)
        writer: pa.ipc.RecordBatchFileWriter | None = None
        waiting: list[pa.RecordBatch] = []
        batches = file.iter_batches(rows, row_groups=[index], columns=columns, use_threads=False)
        for batch in batches:
            if writer is None:
                writer = pa.ipc.new_file(self._file, batch.schema)
            waiting.append(batch)
            if sum(each.num_rows for each in waiting) >= rows:
                waiting = self._write_full(writer, waiting, rows)
        if writer is not None:
            if waiting:
                writer.write_batch(_joined(waiting))
            writer.close()

    @staticmethod
    def _write_full(
        writer: pa.ipc.RecordBatchFileWriter, waiting: list[pa.RecordBatch], rows: int
    ) -> list[pa.RecordBatch]:
        """Arrow ends a batch early where it likes: pieces are exact. Returns what is left over."""
        joined = _joined(waiting)
        while joined.num_rows >= rows:
            writer.write_batch(joined.slice(0, rows))
            joined = joined.slice(rows)
        return [joined] if joined.num_rows else []


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).combine_chunks()
    return table.to_batches()[0]


T = TypeVar("T", bound="GroupReader")


class GroupReader(ABC):
    """Reads `columns` (all, if none are named) of a data set that a manifest describes."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self._store = store
        self._manifest = manifest
        names = [column.name for column in manifest.columns] if columns is None else columns
        self.columns: tuple[Column, ...] = tuple(manifest.column(name) for name in dict.fromkeys(names))
        self._groups = RowGroupCache(cache_bytes)

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fetch(self, group: int) -> ColumnArrays:
        """Column -> read-only array (rows, *shape) of a row group."""
        return self._groups.fetch(group, self._decode)

    def prefetch(self, group: int) -> bool:
        """Decode it now; False if there is no room for it."""
        return self._groups.prefetch(group, self._decode)

    def release(self, group: int | None = None) -> None:
        """It is the next to be forgotten; all are where it is None."""
        self._groups.release(group)

    def close(self) -> None:
        """Let everything go; waits for a decoding thread."""
        self._groups.close(self._let_go)

    @abstractmethod
    def _decode(self, group: int) -> ColumnArrays:
        """See `reader.Reader.fetch` for what it raises."""

    @abstractmethod
    def _let_go(self) -> None:
        """Close what is open."""


# Row groups of Parquet files as numpy arrays, by Arrow.
#
# Owns the open files, and the pieces of row groups that are too large for memory. Knows nothing of steps or ranks. Any
# thread may fetch; one decodes at a time.


OPEN_FILES = 128


class ArrowReader(GroupReader):
    """Reads row groups with Arrow. Arrays are views of Arrow's memory where that is possible."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        super().__init__(store, manifest, columns, cache_bytes)
        self._files: OrderedDict[int, tuple[pq.ParquetFile, Any]] = OrderedDict()
        self._pieces = SplitGroupCache()
        self._lengths: dict[tuple[int, int], int] = {}
        self._names: dict[int, list[str]] = {}  # the columns that are in each file

    def _let_go(self) -> None:
        while self._files:
            self._close_oldest()
        self._pieces.close()

    def _decode(self, group: int) -> ColumnArrays:
        entry = self._manifest.row_groups[group]
        name = self._manifest.files[entry.file]
        try:
            rows = self._piece(entry) if entry.parent_rows else self._whole(entry)
            if rows.num_rows != entry.rows:
                raise ValueError(f"it has {rows.num_rows} rows, not the {entry.rows} rows of the manifest")
            return decode_columns(rows, self.columns, partition_values(name))
        except (OSError, pa.ArrowException, KeyError, IndexError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(
                f"Cannot read row group {entry.index} of {name!r} in the store {self._store.url} ({reason})."
            ) from error

    def _whole(self, entry: RowGroup) -> pa.Table:
        file, _ = self._open(entry.file)
        stored = self._names.get(entry.file)
        if stored is None:
            stored = self._names[entry.file] = self._stored(file)
        return file.read_row_group(entry.index, stored, use_threads=False)

    def _piece(self, entry: RowGroup) -> pa.RecordBatch:
        """One piece of a row group that was cut. All pieces but the last are equally long."""
        key = (entry.file, entry.index)
        if key not in self._lengths:
            groups = self._manifest.row_groups
            self._lengths[key] = next(each.rows for each in groups if (each.file, each.index) == key)
        length = self._lengths[key]
        return self._pieces.get(key, lambda: self._cut(entry, length)).read(entry.first_row // length)

    def _cut(self, entry: RowGroup, length: int) -> SplitRowGroup:
        file, source = self._open(entry.file)
        return SplitRowGroup(source, entry.index, self._stored(file), length)

    def _stored(self, file: pq.ParquetFile) -> list[str]:
        """The columns that are in the file; the others are in its path."""
        there = set(file.schema_arrow.names)
        return [column.name for column in self.columns if column.name in there]

    def _open(self, number: int) -> tuple[pq.ParquetFile, Any]:
        if number not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._close_oldest()
            name = self._manifest.files[number]
            # No memory map: its pages would count as this process's memory for as long as the file is open.
            source = (
                pa.OSFile(self._store.path(name)) if self._store.is_local else self._store.open_read(name)
            )
            self._files[number] = (open_parquet(source, pre_buffer=not self._store.is_local), source)
        self._files.move_to_end(number)
        return self._files[number]

    def _close_oldest(self) -> None:
        _, (file, source) = self._files.popitem(last=False)
        file.close()
        source.close()
