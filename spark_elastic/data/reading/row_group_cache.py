"""Decoded row groups in memory, bounded in bytes and by the memory that this process may still take, and on disk.

Any thread may fetch; one decodes at a time. A bound above DEFAULT_CACHE_BYTES holds only while a quarter of the memory
(of the machine, the container, the address space) is free. A row group that is too large for memory is split once on a
machine, by the first worker that needs it, into parts in a file of that worker's scratch folder, which others open.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from spark_elastic.data.available_memory import measure_available_memory
from spark_elastic.data.reading.decoding import ColumnArrays, drop_views, join_batches, nbytes, open_parquet
from spark_elastic.data.scratch import find_scratch_folders, make_scratch_folder
from spark_elastic.errors import StoreError

DEFAULT_CACHE_BYTES = 128 << 20  # with it a worker stays below 1 GB: benchmarks/memory.py
FREE_SHARE = 4  # 1/4 of the memory stays free: for activations, checkpoints and other processes

log = logging.getLogger("spark_elastic")


class RowGroupCache:
    """Decoded row groups by number. A row group is in use from `fetch` until `release`.

    Above the bound it evicts the row group that was released last; if all are in use, the one before the newest. Epochs
    read row groups in about the same order: the last one used is the last one needed again.
    """

    def __init__(
        self, limit: int, room: Callable[[], tuple[int, int] | None] = measure_available_memory
    ) -> None:
        """room: (free bytes, limit) of the memory; called before the cache grows above the default."""
        self._limit, self._room = limit, room
        self._allowed = DEFAULT_CACHE_BYTES  # grows while there is memory
        self._changed = threading.Condition()
        self._decoding = False
        self._waiting = 0  # threads that wait in `fetch`
        self._in_use: dict[int, tuple[ColumnArrays, int]] = {}
        self._released: dict[int, tuple[ColumnArrays, int]] = {}
        self._bytes = 0
        self._largest = 0
        self._closed = False

    def __contains__(self, group: int) -> bool:
        with self._changed:
            return group in self._in_use or group in self._released

    def __len__(self) -> int:
        return len(self._in_use) + len(self._released)

    def fetch(self, group: int, decode: Callable[[int], ColumnArrays]) -> ColumnArrays:
        with self._changed:
            found = self._get(group)
            if found is None:
                found = self._wait_for(group)
            if found is not None:
                return found
            if self._closed:
                raise StoreError("The reader is closed: open a new one.")
            self._decoding = True
        return self._decode_and_keep(group, decode)

    def prefetch(self, group: int, decode: Callable[[int], ColumnArrays]) -> bool:
        """Decode a row group ahead, once no thread waits in `fetch`. False: no room beside those in use."""
        with self._changed:
            self._changed.wait_for(lambda: not self._decoding and not self._waiting)
            if self._get(group) is not None or self._closed:
                return True
            if sum(size for _, size in self._in_use.values()) + self._largest > self._limit:
                return False
            self._decoding = True
        self._decode_and_keep(group, decode)
        return True

    def release(self, group: int | None = None) -> None:
        with self._changed:
            if group is None:
                self._released.update(self._in_use)
                self._in_use.clear()
            elif group in self._in_use:
                self._released[group] = self._in_use.pop(group)

    def close(self, on_close: Callable[[], None]) -> None:
        """Wait for a decoding thread, drop everything and call `on_close`; nothing is decoded any more."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._decoding)
            self._in_use.clear()
            self._released.clear()
            self._bytes = 0
        on_close()

    def _get(self, group: int) -> ColumnArrays | None:
        entry = self._in_use.pop(group, None) or self._released.pop(group, None)
        if entry is None:
            return None
        self._in_use[group] = entry
        return entry[0]

    def _wait_for(self, group: int) -> ColumnArrays | None:
        """Wait while others decode. None if the caller is to decode it."""
        self._waiting += 1
        try:
            while self._decoding:
                self._changed.wait()
                found = self._get(group)
                if found is not None:
                    return found
            return None
        finally:
            self._waiting -= 1
            self._changed.notify_all()

    def _decode_and_keep(self, group: int, decode: Callable[[int], ColumnArrays]) -> ColumnArrays:
        """Called by the one thread that has set `_decoding`."""
        try:
            rows = decode(group)
            with self._changed:
                self._put(group, rows)
            return rows
        finally:
            with self._changed:
                self._decoding = False
                self._changed.notify_all()

    def _put(self, group: int, rows: ColumnArrays) -> None:
        size = nbytes(rows)
        self._in_use[group] = rows, size
        self._bytes += size
        self._largest = max(self._largest, size)
        if self._allowed < self._bytes <= self._limit:
            self._grow()
        while self._bytes > self._limit and len(self._in_use) + len(self._released) > 1:
            if self._released:
                _, (_, freed) = self._released.popitem()
            else:
                _, freed = self._in_use.pop(list(self._in_use)[-2])
            self._bytes -= freed

    def _grow(self) -> None:
        """Allow the present size if enough memory is free; else limit the cache for good to the last allowed size."""
        room = self._room()
        if room is None or room[0] * FREE_SHARE > room[1]:
            self._allowed = self._bytes
            return
        self._limit = self._allowed
        sizes = self._limit >> 20, room[0] >> 20, room[1] >> 20
        log.warning(
            "not all rows fit into memory: %d MB of decoded rows are kept, since %d of %d MB are left", *sizes
        )


# ---- row groups too large for memory, split on disk

_STREAMED = 1 << 20  # bytes of a column that are read at a time
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SplitGroupCache:
    """Split row groups by key. Before another one is split, the least recently used ones are dropped until the disk
    has as much free space as the rest takes, since other workers use the disk, too."""

    def __init__(self) -> None:
        self._groups_by_key: OrderedDict[str, SplitRowGroup] = OrderedDict()
        self._resources = ExitStack()
        self._folder: Path | None = None  # this process's own

    def get(self, key: str, split: Callable[[str], None]) -> SplitRowGroup:
        """A split row group, by whichever worker of this machine, or split now by `split` into a new file of that path.
        key: names the row group and its parts, a name of a file."""
        if key not in self._groups_by_key:
            self._make_room()
            self._groups_by_key[key] = self._find_shared(key) or self._create(key, split)
        self._groups_by_key.move_to_end(key)
        return self._groups_by_key[key]

    def close(self) -> None:
        while self._groups_by_key:
            self._drop_oldest()
        self._resources.close()
        self._folder = None

    def _find_shared(self, key: str) -> SplitRowGroup | None:
        """What another worker has split. None if it is still at it: it may have stopped."""
        for folder in find_scratch_folders():
            # It is not there, not complete yet, or never will be
            with suppress(OSError, ValueError):
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
        while self._groups_by_key:
            taken = sum(each.bytes for each in self._groups_by_key.values())
            if taken <= shutil.disk_usage(tempfile.gettempdir()).free:
                break
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._groups_by_key.popitem(last=False)[1].close()


class SplitRowGroup:
    """The rows of one row group on disk. Readable even after whoever has the file has deleted it."""

    def __init__(self, path: str, owned: bool = False) -> None:
        """owned: whether `close` deletes the file. Raises ValueError if that is not complete."""
        self._path = path if owned else None
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self.bytes = os.fstat(self._file.fileno()).st_size
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def read(self, number: int) -> pa.RecordBatch:
        """A part, mapped until nobody uses its arrays: its pages count as this process's memory, as a copy would."""
        parts = self._open()
        if not parts.num_record_batches:  # all columns that are needed are constants
            return pa.RecordBatch.from_arrays([], names=[])
        return parts.get_batch(number)

    def _open(self) -> pa.ipc.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{self._file.fileno()}"))

    def close(self) -> None:
        """Close the parts; they are deleted once the others that read them close them, too."""
        self._file.close()
        if self._path is not None:
            os.unlink(self._path)


def split_row_group(source: Any, index: int, columns: list[str], rows: int, path: str) -> None:
    """Write a row group in parts of `rows` rows to a file of Arrow. source: an open Parquet file, which stays open."""
    file = open_parquet(source, buffer_size=_STREAMED)
    batches = file.iter_batches(rows, row_groups=[index], columns=columns, use_threads=False)
    plain = map(_make_plain, batches if columns else ())
    first = next(plain, pa.RecordBatch.from_arrays([], names=[]))
    waiting: list[pa.RecordBatch] = []
    with pa.OSFile(path, "wb") as target, pa.ipc.new_file(target, first.schema) as writer:
        for batch in chain([first], plain):
            waiting.append(batch)
            # Arrow's batches may be shorter than was asked for.
            while sum(each.num_rows for each in waiting) >= rows:
                joined = join_batches(waiting)
                writer.write_batch(joined.slice(0, rows))
                waiting = [joined.slice(rows)]
        if any(each.num_rows for each in waiting):
            writer.write_batch(join_batches(waiting))


def _make_plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without views and dictionaries: Arrow's files have one for all batches."""
    columns = []
    for column in batch.columns:
        is_encoded = pa.types.is_dictionary(column.type)
        columns.append(drop_views(column.dictionary_decode() if is_encoded else column))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
