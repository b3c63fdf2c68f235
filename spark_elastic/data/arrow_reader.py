"""Row groups of Parquet files as numpy arrays, by Arrow.

Owns the open files and the decoded row groups, least recently used first out, bounded in bytes. Knows nothing of
steps or ranks. Any thread may fetch; one decodes at a time.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.reader import Decoded
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError

OPEN_FILES = 128
DEFAULT_CACHE_BYTES = 256 << 20


class ArrowReader:
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
        self._cache = _Cache(cache_bytes)
        self._decoding = threading.Lock()
        self._files: OrderedDict[int, tuple[pq.ParquetFile, Any]] = OrderedDict()
        self._closed = False

    def __enter__(self) -> ArrowReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fetch(self, group: int) -> Decoded:
        """Column -> read-only array (rows, *shape) of a row group; a view of Arrow's memory but for booleans."""
        found = self._cache.get(group)
        if found is not None:
            return found
        with self._decoding:
            # Another thread may have decoded it while this one waited.
            found = self._cache.get(group)
            if found is None:
                found = self._decode(group)
                self._cache.put(group, found)
            return found

    def close(self) -> None:
        """Close the files and forget the decoded row groups; waits for a decoding thread."""
        with self._decoding:
            self._closed = True
            while self._files:
                self._close_oldest()
            self._cache.clear()

    def _decode(self, group: int) -> Decoded:
        if self._closed:
            raise StoreError("The reader is closed: open a new one.")
        entry = self._manifest.row_groups[group]
        name = self._manifest.files[entry.file]
        try:
            file = self._open(entry.file, name)
            table = file.read_row_group(
                entry.index, [column.name for column in self.columns], use_threads=False
            )
            return {column.name: _array(table[column.name], column, entry.rows) for column in self.columns}
        except (OSError, pa.ArrowException, KeyError, IndexError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(
                f"Cannot read row group {entry.index} of {name!r} in the store {self._store.url} ({reason})."
            ) from error

    def _open(self, number: int, name: str) -> pq.ParquetFile:
        if number not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._close_oldest()
            if self._store.is_local:
                source: Any = pa.memory_map(self._store.path(name))
            else:
                source = self._store.open_read(name)
            self._files[number] = (pq.ParquetFile(source, pre_buffer=not self._store.is_local), source)
        self._files.move_to_end(number)
        return self._files[number][0]

    def _close_oldest(self) -> None:
        _, (file, source) = self._files.popitem(last=False)
        file.close()
        source.close()


class _Cache:
    """Decoded row groups, bounded in bytes; the newest stays even where it alone is over the bound."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, Decoded] = OrderedDict()
        self._bytes = 0

    def get(self, group: int) -> Decoded | None:
        with self._lock:
            found = self._groups.get(group)
            if found is not None:
                self._groups.move_to_end(group)
            return found

    def put(self, group: int, decoded: Decoded) -> None:
        with self._lock:
            self._groups[group] = decoded
            self._bytes += _bytes(decoded)
            while self._bytes > self._limit and len(self._groups) > 1:
                self._bytes -= _bytes(self._groups.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._groups.clear()
            self._bytes = 0


def _bytes(decoded: Decoded) -> int:
    return sum(array.nbytes for array in decoded.values())


def _array(chunked: pa.ChunkedArray, column: Column, rows: int) -> npt.NDArray[np.generic]:
    """A column of a row group as (rows, *shape); copies only booleans, other dtypes and split columns."""
    if chunked.null_count:
        raise ValueError(f"column {column.name!r} has {chunked.null_count} nulls")
    values = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks)
    for _ in column.shape:
        values = values.flatten()
    if len(values) != rows * math.prod(column.shape) or values.null_count:
        raise ValueError(
            f"column {column.name!r} is not the {rows} rows of shape {column.shape} it was written as"
        )
    flat: npt.NDArray[np.generic] = values.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    array = flat.reshape(rows, *column.shape)
    array.flags.writeable = False
    return array
