"""Row groups too large for memory, cut once into pieces on this machine's disk.

Owns the pieces: Arrow's own format in files without a name, which end with the process whatever its death. Knows
nothing of how a piece is decoded. Used under the reader's lock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc

from spark_elastic.data.parquet import opened

_STREAMED = 1 << 20  # bytes of a column that are read at a time


class Pieces:
    """The rows of one row group in pieces of `rows` rows (the last may have fewer); a part at a time is in memory."""

    def __init__(self, source: Any, index: int, columns: Sequence[str], rows: int) -> None:
        """source: an open Parquet file, read once from beginning to end and left open."""
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._cut(source, index, list(columns), rows)
            self._reader = pa.ipc.open_file(self._file)
        except BaseException:
            self._file.close()
            raise

    def read(self, number: int) -> pa.RecordBatch:
        """A piece, in memory of its own."""
        return self._reader.get_batch(number)

    def close(self) -> None:
        """The pieces are gone."""
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
        self._file.seek(0)

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
