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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column, FileColumns, Manifest, RowGroup
from spark_elastic.data.object_store import Range, RemoteFile, RetryingClient, coalesce
from spark_elastic.data.reading.decoding import (
    FOOTER_BYTES,
    ColumnArrays,
    decode_columns,
    drop_views,
    find_footer_length,
    open_parquet,
    parse_footer,
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


class Reader(ABC):
    """Reads row groups of a data set, by their number in its manifest. Any thread may fetch. columns: None: all.
    cache_bytes: for decoded row groups; a data set that fits is read once."""

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
        """Column -> read-only array (rows, *shape), maybe a view of shared memory. Raises StoreError."""
        return self._groups.fetch(group, self._decode)

    def prefetch(self, group: int) -> bool:
        """Read a row group that will be fetched soon. False if there is no room for it. Raises as `fetch` does."""
        return self._groups.prefetch(group, self._decode)

    def announce(self, groups: Iterable[int]) -> None:  # noqa: B027 - most readers have nothing to begin
        """Row groups that will be fetched soon, in this order: a reader may begin to read them. Does not wait."""

    def release(self, group: int | None = None) -> None:
        """The row group (None: any) is not needed for a while, so that it may be evicted."""
        self._groups.release(group)

    def close(self) -> None:
        """Close files and free memory, once no thread decodes."""
        self._groups.close(self._close_resources)

    def columns_of(self, file: int) -> FileColumns:
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
        """Raises as `fetch` does."""

    @abstractmethod
    def _close_resources(self) -> None: ...


OPEN_FILES = 128
REMOTE_GROUP_BYTES = 128 << 20  # larger row groups of object stores are streamed while they are split


class ArrowReader(Reader):
    """Reads row groups with Arrow. Arrays are views of Arrow's memory where that is possible."""

    def __init__(self, store: Store, manifest: Manifest, *given: Any, **options: Any) -> None:
        super().__init__(store, manifest, *given, **options)
        self._files: OrderedDict[int, tuple[pq.ParquetFile, Any]] = OrderedDict()
        self._split_groups = SplitGroupCache()
        self._names: dict[int, dict[str, str]] = {}  # of each file: its columns that are needed -> ours
        client = store.client
        self._remote = None if client is None else RemoteGroups(store, client, manifest)

    def announce(self, groups: Iterable[int]) -> None:
        # Parts of one row group are read together, when the first is needed.
        if self._remote is not None:
            entries = [
                (group, self._manifest.row_groups[group]) for group in groups if group not in self._groups
            ]
            self._remote.announce(
                (group, self._find_names(e.file)) for group, e in entries if not e.parent_rows
            )

    def release(self, group: int | None = None) -> None:
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
                raise ValueError(f"it has {rows.num_rows} rows, not the manifest's {entry.stored_rows}")
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
                    "its bytes are not those that were written, by their checksum: bring the file back; rows that fit "
                    f"has written are written anew once {name.rpartition('/')[0]} is removed, in another run"
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

        def split(path: str) -> None:
            with self._open(group, entry) as (_, source):
                split_row_group(source, entry.index, list(self._names[entry.file]), entry.part_rows, path)

        return self._split_groups.get(key, split).read(entry.first_row // entry.part_rows)

    @contextmanager
    def _open(self, group: int, entry: RowGroup) -> Iterator[tuple[pq.ParquetFile, Any]]:
        """The file of a row group, whose bytes are in memory if they come from an object store."""
        if self._remote is None:
            yield self._keep_open(entry.file)
            return
        whole = entry.bytes * max(1, entry.parent_rows) // (entry.rows if entry.parent_rows else 1)
        names = self._find_names(entry.file) if whole <= REMOTE_GROUP_BYTES else ()
        loaded = self._remote.take(group, names)
        file, source = self._keep_open(entry.file, loaded)
        source.keep(loaded.ranges)
        try:
            yield file, source
        finally:
            source.keep({})

    def _keep_open(self, number: int, loaded: LoadedGroup | None = None) -> tuple[pq.ParquetFile, Any]:
        if number not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._close_oldest()
            name, store = self._manifest.files[number], self._store
            if loaded is not None and self._remote is not None:
                source: Any = RemoteFile(self._remote.client, store.path(name), loaded.size)
            else:  # no memory map: its pages would count as this process's memory while the file is open
                source = pa.OSFile(store.path(name)) if store.is_local else store.open_read(name)
            pre_buffer = not (store.is_local or self._remote)
            file = open_parquet(source, pre_buffer=pre_buffer, footer=loaded.footer if loaded else None)
            self._files[number] = (file, source)
            there, wanted = set(file.schema_arrow.names), self._find_names(number)
            self._names[number] = {name: own for name, own in wanted.items() if name in there}
        self._files.move_to_end(number)
        return self._files[number]

    def _find_names(self, number: int) -> dict[str, str]:
        """The names that a file has for the columns that are needed, if they are in it -> ours."""
        stored = self.columns_of(number).stored_names
        return {stored.get(column.name, column.name): column.name for column in self.columns}

    def _close_oldest(self) -> None:
        number, (file, source) = self._files.popitem(last=False)
        file.close()
        source.close()
        if self._remote is not None:
            self._remote.footers.pop(number, None)


GROUPS_AHEAD = 8  # row groups that are read at once
BYTES_AHEAD = 32 << 20  # of these, by their sizes before compression; at least one is read
GAP = 256 << 10  # bytes between two columns that cost less than another request

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
        self._store, self.client, self._manifest = store, client, manifest
        self._changed = threading.Lock()
        self._wanted: dict[int, Collection[str]] = {}  # row groups in order -> names of columns in the file
        self._reading: dict[int, Future[LoadedGroup]] = {}
        self.footers: dict[int, asyncio.Task[Footer]] = {}  # by file; only fsspec's thread adds one

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
        return self.client.begin(self._load(self._manifest.row_groups[group], names))

    async def _load(self, entry: RowGroup, names: Collection[str]) -> LoadedGroup:
        path = self._store.path(self._manifest.files[entry.file])
        size, footer = await self._find_footer(entry.file, path)
        ranges = coalesce(find_chunks(footer, entry.index, names), GAP)
        found = await self.client.read_ranges(path, ranges)
        contents = {start: content for (start, _), content in zip(ranges, found, strict=True)}
        return LoadedGroup(size, footer, contents)

    async def _find_footer(self, file: int, path: str) -> Footer:
        """Several row groups of a file share one read of its footer, which outlives those that are cancelled."""
        task = self.footers.get(file)
        if task is None:
            task = self.footers[file] = asyncio.ensure_future(self._read_footer(path))
            task.add_done_callback(lambda ended: self._forget_failed(file, ended))
        return await asyncio.shield(task)

    def _forget_failed(self, file: int, task: asyncio.Task[Footer]) -> None:
        """The next read of that file tries again, even if nobody waited for this one."""
        if (task.cancelled() or task.exception() is not None) and self.footers.get(file) is task:
            del self.footers[file]

    async def _read_footer(self, path: str) -> Footer:
        size, tail = await self.client.read_tail(path, FOOTER_BYTES)
        if find_footer_length(tail) > len(tail):
            size, tail = await self.client.read_tail(path, find_footer_length(tail))
        return size, parse_footer(tail)


def find_chunks(footer: pq.FileMetaData, index: int, names: Collection[str]) -> Iterator[Range]:
    group = footer.row_group(index)
    for number in range(group.num_columns):
        chunk = group.column(number)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in names):
            starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
            start = min(each for each in starts if each)
            yield start, start + chunk.total_compressed_size
