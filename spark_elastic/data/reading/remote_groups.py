"""Row groups of Parquet files in an object store: the ranges of the columns that are needed, several read at once.

Reads begin in fsspec's thread before the row group is decoded, some row groups ahead. Any thread may announce; the
thread that decodes takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Manifest, RowGroup
from spark_elastic.data.remote_file import TAIL_BYTES, RemoteFile, coalesce
from spark_elastic.data.retries import Range, RetryingClient
from spark_elastic.data.store import Store

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
