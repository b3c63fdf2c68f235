"""Reads row groups of Parquet files as numpy arrays, by Arrow; `GroupReader` is the base of all readers.

A row group that is too large for memory is split once on a machine, by the first worker that needs it, into parts in a
file of that worker's scratch folder, which the others open. Any thread may fetch; one decodes at a time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import struct
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column, FileColumns, Manifest, RowGroup
from spark_elastic.data.reading.decoding import (
    ColumnArrays,
    decode_columns,
    drop_views,
    open_parquet,
    partition_values,
)
from spark_elastic.data.reading.remote_groups import RemoteGroups
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES, RowGroupCache
from spark_elastic.data.store import Store, find_scratch_folders, make_scratch_folder
from spark_elastic.errors import StoreError

_STREAMED = 1 << 20  # bytes of a column that are read at a time
_END = struct.Struct("<q")  # a number behind the parts of a split row group


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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


class SplitGroupCache:
    """Split row groups by key. Before another one is split, the least recently used ones are dropped until the disk has
    as much free space as the rest takes, since other workers use the disk, too."""

    def __init__(self) -> None:
        self._groups_by_key: OrderedDict[str, SplitRowGroup] = OrderedDict()
        self._resources = ExitStack()
        self._folder: Path | None = None  # this process's own

    def get(self, key: str, split: Callable[[str], None]) -> SplitRowGroup:
        """A split row group: its own, another worker's of this machine, or one that is split now.

        Args:
            key: names the row group and its parts, a name of a file.
            split: splits it into a new file of that path.
        """
        if key not in self._groups_by_key:
            self._make_room()
            self._groups_by_key[key] = self._find_shared(key) or self._create(key, split)
        self._groups_by_key.move_to_end(key)
        return self._groups_by_key[key]

    def close(self) -> None:
        """Drop all split row groups."""
        while self._groups_by_key:
            self._drop_oldest()
        self._resources.close()
        self._folder = None

    def _find_shared(self, key: str) -> SplitRowGroup | None:
        """What another worker has split. None if it is still at it: it may have stopped."""
        for folder in find_scratch_folders():
            # It is not there, not complete yet, or never will be
            with suppress(OSError, ValueError, struct.error):
                with open(folder / key, "rb") as file:
                    if os.fstat(file.fileno()).st_uid == os.getuid():
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        return SplitRowGroup(f"/proc/self/fd/{file.fileno()}")
        return None

    def _create(self, key: str, split: Callable[[str], None]) -> SplitRowGroup:
        if self._folder is None:
            self._folder = self._resources.enter_context(make_scratch_folder())
        path = self._folder / key
        try:
            with open(path, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                split(str(path))
            return SplitRowGroup(str(path), owned=True)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise StoreError(
                    f"A row group too large for memory could not be cut in {tempfile.gettempdir()} "
                    f"({os.strerror(error.errno)}): set TMPDIR to a folder with more room, or write smaller row groups."
                ) from error
            raise

    def _make_room(self) -> None:
        while self._groups_by_key and self._bytes() > shutil.disk_usage(tempfile.gettempdir()).free:
            self._drop_oldest()

    def _bytes(self) -> int:
        return sum(each.bytes for each in self._groups_by_key.values())

    def _drop_oldest(self) -> None:
        self._groups_by_key.popitem(last=False)[1].close()


class SplitRowGroup:
    """The rows of one row group on disk, as `split_row_group` wrote them. Readable even after whoever has the file has
    deleted it."""

    def __init__(self, path: str, owned: bool = False) -> None:
        """
        Args:
            owned: whether `close` deletes the file.

        Raises:
            ValueError: the file is not complete.
        """
        self._path = path if owned else None
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self.bytes = os.fstat(self._file.fileno()).st_size
        try:
            self._ends = self._read_ends()
        except BaseException:
            self._file.close()
            raise

    def read(self, number: int) -> pa.RecordBatch:
        """A part, mapped until nobody uses its arrays: its pages count as this process's memory, as a copy would."""
        if len(self._ends) == 1:  # all columns that are needed are constants, and there are no parts
            return pa.RecordBatch.from_arrays([], names=[])
        begin, end = self._ends[number], self._ends[number + 1]
        before = begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._file.fileno(), end - begin + before, access=mmap.ACCESS_READ, offset=begin - before
        )
        mapped.madvise(mmap.MADV_WILLNEED)  # rows are taken in any order
        return pa.ipc.open_stream(pa.py_buffer(mapped).slice(before)).read_next_batch()

    def close(self) -> None:
        """Close the parts; they are deleted once the others that read them close them, too."""
        self._file.close()
        if self._path is not None:
            os.unlink(self._path)

    def _read_ends(self) -> list[int]:
        self._file.seek(max(0, self.bytes - _END.size))
        (count,) = _END.unpack(self._file.read())
        begin = self.bytes - (count + 1) * _END.size
        self._file.seek(max(0, begin))
        *ends, _ = struct.unpack(f"<{max(0, count) + 1}q", self._file.read())
        if not ends or ends[-1] != begin:
            raise ValueError(f"{self._file.name} is not complete")
        return ends


def split_row_group(source: Any, index: int, columns: list[str], rows: int, path: str) -> None:
    """Write the rows of a row group in parts of `rows` rows (the last may have fewer) to a file: a stream of Arrow for
    each, then where they end, from 0, and how many numbers these are.

    Args:
        source: an open Parquet file, which is read once and stays open.
    """
    file = open_parquet(source, buffer_size=_STREAMED)
    batches = file.iter_batches(rows, row_groups=[index], columns=columns, use_threads=False)
    waiting: list[pa.RecordBatch] = []
    ends = [0]
    with pa.OSFile(path, "wb") as target:

        def write(part: pa.RecordBatch) -> None:
            with pa.ipc.new_stream(target, part.schema) as writer:
                writer.write_batch(part)
            ends.append(target.tell())

        for batch in map(_make_plain, batches if columns else ()):
            waiting.append(batch)
            if sum(each.num_rows for each in waiting) >= rows:
                waiting = _write_full(write, waiting, rows)
        if waiting:
            write(_concatenate(waiting))
        target.write(struct.pack(f"<{len(ends) + 1}q", *ends, len(ends)))


def _write_full(
    write: Callable[[pa.RecordBatch], None], waiting: list[pa.RecordBatch], rows: int
) -> list[pa.RecordBatch]:
    """Write parts of exactly `rows` rows, since Arrow's batches may be shorter. Returns the remaining rows."""
    joined = _concatenate(waiting)
    while joined.num_rows >= rows:
        write(joined.slice(0, rows))
        joined = joined.slice(rows)
    return [joined] if joined.num_rows else []


def _make_plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without views, and with values in place of their numbers: Arrow's files have one dictionary for all
    batches."""
    columns = [
        each.dictionary_decode() if pa.types.is_dictionary(each.type) else drop_views(each)
        for each in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _concatenate(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).combine_chunks()
    return table.to_batches()[0]
