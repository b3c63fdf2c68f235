"""Row groups too large for memory, cut into pieces on this machine's disk: once, as long as that has room.

Owns the pieces: Arrow's own format in files without a name, which end with the process whatever its death. Knows
nothing of how a piece is decoded. Used under the reader's lock.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc

from spark_elastic.data.reading.decoding import opened
from spark_elastic.errors import StoreError

_STREAMED = 1 << 20  # bytes of a column that are read at a time


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CutGroups:
    """Row groups in pieces, by key. Before one more is cut, those that were not used for longest go until the disk has
    as much left as they take: other workers cut on it, too."""

    def __init__(self) -> None:
        self._held: OrderedDict[Hashable, Pieces] = OrderedDict()

    def get(self, key: Hashable, cut: Callable[[], Pieces]) -> Pieces:
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


class Pieces:
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
        file = opened(source, buffer_size=_STREAMED)
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
