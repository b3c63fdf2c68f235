"""Reads row groups of Parquet files as numpy arrays, by Arrow; `GroupReader` is the base of all readers.

Of an object store only the ranges of the columns that are needed are read, some row groups ahead, in fsspec's thread.
Any thread may fetch and announce; one decodes at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column, FileColumns, Manifest, RowGroup
from spark_elastic.data.object_store import TAIL_BYTES, Range, RemoteFile, RetryingClient, coalesce
from spark_elastic.data.reading.decoding import (
    ColumnArrays,
    decode_columns,
    drop_views,
    open_parquet,
    partition_values,
)
from spark_elastic.data.reading.row_group_cache import (
    DEFAULT_CACHE_BYTES,
    RowGroupCache,
    SplitGroupCache,
    split_row_group,
)
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError


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

    def fetch(self, group: int) -> ColumnArrays:
        """See `Reader.fetch`."""
        return self._groups.fetch(group, self._decode)

    def prefetch(self, group: int) -> bool:
        """See `Reader.prefetch`."""
        return self._groups.prefetch(group, self._decode)

    def announce(self, groups: Iterable[int]) -> None:  # noqa: B027 - most readers have nothing to begin
        """See `Reader.announce`."""

    def release(self, group: int | None = None) -> None:
        """See `Reader.release`."""
        self._groups.release(group)

    def close(self) -> None:
        """See `Reader.close`. Waits for a decoding thread."""
        self._groups.close(self._close_resources)

    def columns_of(self, file: int) -> FileColumns:
        """What is known of a file's columns beside its footer."""
        known, names = self._manifest.file_columns, self._manifest.files
        return known[file] if known else FileColumns(partition_values(names[file]))

    def _check_state(self, file: int) -> None:
        """Raise StoreError if a file is no longer what the manifest describes: what was read may not be it either."""
        if not self._manifest.file_states:
            return
        name, before = self._manifest.files[file], self._manifest.file_states[file]
        now = self._store.describe(name).state
        if now != before:
            raise StoreError(
                f"{name!r} in the store {self._store.url} was written again after this run began (it was: {before}; it "
                f"is: {now}), and a run needs the rows that it began with: write other files instead, or a table of "
                "Delta or Iceberg, which keeps its versions, or fit with materialize='always'."
            )

    @abstractmethod
    def _decode(self, group: int) -> ColumnArrays:
        """Decode a row group; raises as `Reader.fetch` does."""

    @abstractmethod
    def _close_resources(self) -> None:
        """Close what is open."""


OPEN_FILES = 128
REMOTE_GROUP_BYTES = 128 << 20  # larger row groups of object stores are streamed while they are split


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
        self._split_groups = SplitGroupCache()
        self._names: dict[int, dict[str, str]] = {}  # of each file: its columns that are needed -> ours
        client = store.client
        self._remote = None if client is None else RemoteGroups(store, client, manifest)

    def announce(self, groups: Iterable[int]) -> None:
        """See `Reader.announce`. Parts of one row group are read together, when the first is needed."""
        if self._remote is not None:
            entries = ((group, self._manifest.row_groups[group]) for group in groups)
            self._remote.announce(
                (group, self._find_names(entry.file))
                for group, entry in entries
                if not entry.parent_rows and group not in self._groups
            )

    def release(self, group: int | None = None) -> None:
        """See `Reader.release`."""
        super().release(group)
        if group is None and self._remote is not None:
            self._remote.cancel()

    def _close_resources(self) -> None:
        if self._remote is not None:
            self._remote.cancel()
        while self._files:
            self._close_oldest()
        self._split_groups.close()

    def _decode(self, group: int) -> ColumnArrays:
        entry = self._manifest.row_groups[group]
        name = self._manifest.files[entry.file]
        try:
            rows = self._read_part(group, entry) if entry.parent_rows else self._read_whole(group, entry)
            self._check_state(entry.file)
            wanted, there = self._find_names(entry.file), set(rows.schema.names)
            # None: all columns are constants, of which nothing is read.
            names = {stored: own for stored, own in wanted.items() if stored in there}
            if names and rows.num_rows != entry.stored_rows:
                raise ValueError(
                    f"it has {rows.num_rows} rows, not the {entry.stored_rows} rows of the manifest"
                )
            if names and entry.keep_mask is not None:
                rows = rows.filter(pa.array(entry.keep_mask))
            found = zip(rows.schema.names, rows.columns, strict=True)
            # By a name with a dot, Arrow reads the field of a struct as well.
            columns = {names[name]: column for name, column in found if name in names}
            constants = self.columns_of(entry.file).constants
            return decode_columns(columns, entry.rows, self.columns, constants)
        except StoreError:
            raise
        except Exception as error:  # each client library has its own classes
            reason = f"{type(error).__name__}: {error}"
            if "CRC checksum" in reason:  # Arrow has no class for it
                reason = (
                    "its bytes are not those that were written, by their checksum: bring the file back, or write the "
                    f"table again; rows that fit has written are written anew once {name.rpartition('/')[0]} is "
                    "removed, in another run"
                )
            raise StoreError(
                f"Cannot read row group {entry.index} of {name!r} in the store {self._store.url} ({reason})."
            ) from error

    def _read_whole(self, group: int, entry: RowGroup) -> pa.Table:
        with self._open(group, entry) as (file, _):
            rows = file.read_row_group(entry.index, list(self._names[entry.file]), use_threads=False)
        return pa.table(list(map(drop_views, rows.columns)), rows.schema.names)

    def _read_part(self, group: int, entry: RowGroup) -> pa.RecordBatch:
        """One part of a split row group. All parts but the last are equally long."""
        # Other files, and other content of these, have another digest.
        known = self._store.url, self._manifest.content, entry.file, entry.index, entry.part_rows
        names = sorted(self._find_names(entry.file))
        key = hashlib.sha256(repr((known, names)).encode()).hexdigest()
        split = self._split_groups.get(key, lambda path: self._split(group, entry, path))
        return split.read(entry.first_row // entry.part_rows)

    def _split(self, group: int, entry: RowGroup, path: str) -> None:
        with self._open(group, entry) as (_, source):
            split_row_group(source, entry.index, list(self._names[entry.file]), entry.part_rows, path)

    @contextmanager
    def _open(self, group: int, entry: RowGroup) -> Iterator[tuple[pq.ParquetFile, Any]]:
        """The file of a row group, whose bytes are in memory if they come from an object store."""
        number = entry.file
        if self._remote is None:
            self._keep_open(number, lambda: self._open_file(self._manifest.files[number]))
            yield self._files[number]
            return
        whole = entry.bytes * max(1, entry.parent_rows) // (entry.rows if entry.parent_rows else 1)
        names = self._find_names(number) if whole <= REMOTE_GROUP_BYTES else ()
        remote, loaded = self._remote, self._remote.take(group, names)
        self._keep_open(number, lambda: remote.open_file(number, loaded.size), loaded.footer)
        file, source = self._files[number]
        source.keep(loaded.ranges)
        try:
            yield file, source
        finally:
            source.keep({})

    def _open_file(self, name: str) -> Any:
        # No memory map: its pages would count as this process's memory while the file is open.
        return pa.OSFile(self._store.path(name)) if self._store.is_local else self._store.open_read(name)

    def _keep_open(
        self, number: int, open_source: Callable[[], Any], footer: pq.FileMetaData | None = None
    ) -> None:
        """Open a file unless it is open. footer: if it is known."""
        if number not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._close_oldest()
            source = open_source()
            pre_buffer = not (self._store.is_local or self._remote)
            file = open_parquet(source, pre_buffer=pre_buffer, footer=footer)
            self._files[number] = (file, source)
            there, wanted = set(file.schema_arrow.names), self._find_names(number)
            self._names[number] = {name: own for name, own in wanted.items() if name in there}
        self._files.move_to_end(number)

    def _find_names(self, number: int) -> dict[str, str]:
        """The names that a file has for the columns that are needed, if they are in it -> ours."""
        stored = self.columns_of(number).stored_names
        return {stored.get(column.name, column.name): column.name for column in self.columns}

    def _close_oldest(self) -> None:
        number, (file, source) = self._files.popitem(last=False)
        file.close()
        source.close()
        if self._remote is not None:
            self._remote.forget(number)


GROUPS_AHEAD = 8  # row groups that are read at once
BYTES_AHEAD = 32 << 20  # of these, by their sizes before compression; at least one is read
GAP = 256 << 10  # bytes between two columns that cost less than another request
_TRAILER = 8  # the footer's length and the magic word

Footer: TypeAlias = tuple[int, pq.FileMetaData]  # with the bytes of its file


@dataclass(frozen=True)
class LoadedGroup:
    """The bytes of a row group that were read."""

    size: int  # bytes of the file
    footer: pq.FileMetaData  # of that file
    ranges: Mapping[int, bytes]  # first byte -> content of the columns


class RemoteGroups:
    """Reads row groups of one data set ahead of the thread that decodes them."""

    def __init__(self, store: Store, client: RetryingClient, manifest: Manifest) -> None:
        self._store, self._client, self._manifest = store, client, manifest
        self._changed = threading.Lock()
        # Row groups that will be needed, in this order, with the names of their columns in the file.
        self._wanted: dict[int, Collection[str]] = {}
        self._reading: dict[int, Future[LoadedGroup]] = {}
        # Reads of footers by file, under way or done. Only fsspec's thread adds one.
        self._footers: dict[int, asyncio.Task[Footer]] = {}

    def announce(self, groups: Iterable[tuple[int, Collection[str]]]) -> None:
        """Row groups that will be taken soon, in this order, and the columns that will be needed of each."""
        with self._changed:
            self._wanted.update((group, names) for group, names in groups if group not in self._reading)
            self._begin_reads()

    def take(self, group: int, names: Collection[str]) -> LoadedGroup:
        """The bytes of a row group; raises what the client does."""
        with self._changed:
            self._wanted.pop(group, None)
            future = self._reading.pop(group, None)
            # What failed before it was needed may succeed now.
            if future is None or (future.done() and future.exception() is not None):
                future = self._begin(group, names)
        try:
            return future.result()
        finally:
            with self._changed:
                self._begin_reads()

    def open_file(self, number: int, size: int) -> RemoteFile:
        """The file, of which nothing is in memory yet."""
        return RemoteFile(self._client, self._store.path(self._manifest.files[number]), size, {})

    def forget(self, file: int) -> None:
        """Drop the footer of a file."""
        self._footers.pop(file, None)

    def cancel(self) -> None:
        """End the reads that are under way: other row groups will be needed."""
        with self._changed:
            self._wanted.clear()
            for future in self._reading.values():
                future.cancel()
            self._reading.clear()

    def _begin_reads(self) -> None:
        """Called with the lock."""
        size = sum(int(self._manifest.row_groups.bytes[group]) for group in self._reading)
        while self._wanted and len(self._reading) < GROUPS_AHEAD:
            group, names = next(iter(self._wanted.items()))
            size += int(self._manifest.row_groups.bytes[group])
            if self._reading and size > BYTES_AHEAD:
                return
            del self._wanted[group]
            self._reading[group] = self._begin(group, names)

    def _begin(self, group: int, names: Collection[str]) -> Future[LoadedGroup]:
        return self._client.begin(self._load(self._manifest.row_groups[group], names))

    async def _load(self, entry: RowGroup, names: Collection[str]) -> LoadedGroup:
        path = self._store.path(self._manifest.files[entry.file])
        size, footer = await self._find_footer(entry.file, path)
        ranges = coalesce(find_chunks(footer, entry.index, names), GAP)
        found = await self._client.read_ranges(path, ranges)
        contents = {start: content for (start, _), content in zip(ranges, found, strict=True)}
        return LoadedGroup(size, footer, contents)

    async def _find_footer(self, file: int, path: str) -> Footer:
        """Several row groups of a file share one read of its footer, which outlives those that are cancelled."""
        task = self._footers.get(file)
        if task is None:
            task = self._footers[file] = asyncio.ensure_future(self._read_footer(path))
            task.add_done_callback(lambda ended: self._forget_failed(file, ended))
        return await asyncio.shield(task)

    def _forget_failed(self, file: int, task: asyncio.Task[Footer]) -> None:
        """The next read of that file tries again, even if nobody waited for this one."""
        if (task.cancelled() or task.exception() is not None) and self._footers.get(file) is task:
            del self._footers[file]

    async def _read_footer(self, path: str) -> Footer:
        size, tail = await self._client.read_tail(path, TAIL_BYTES)
        length = int.from_bytes(tail[-_TRAILER:-4], "little") + _TRAILER
        if length > len(tail):
            size, tail = await self._client.read_tail(path, length)
        return size, pq.read_metadata(pa.BufferReader(tail[-length:]))


def find_chunks(footer: pq.FileMetaData, index: int, names: Collection[str]) -> Iterator[Range]:
    """Where the chunks of these columns are, of one row group."""
    group = footer.row_group(index)
    for number in range(group.num_columns):
        chunk = group.column(number)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in names):
            starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
            start = min(each for each in starts if each)
            yield start, start + chunk.total_compressed_size
