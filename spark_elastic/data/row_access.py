"""Rows of a data set by their numbers, in any order: `RowAccess`, which each process opens for itself.

Row groups come through the cache of the process, which all accesses to the same columns of a data set share. A pickled
or forked copy opens files of its own. Any thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import Int64s
from spark_elastic.data.reading.decoding import ColumnArrays, Reader
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput


class _OpenReader:
    """A reader that closes once nobody in this process uses it."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.reader = open_reader("arrow", store, manifest)
        weakref.finalize(self, _close_here, self.reader, os.getpid()).atexit = False


def _close_here(reader: Reader, process: int) -> None:
    # In a fork, a thread that is not there may have been reading when the process was copied.
    if process == os.getpid():
        reader.close()


# By process, file system (another one has other credentials), store and hash of the manifest.
_open_readers: weakref.WeakValueDictionary[tuple[int, int, str, str], _OpenReader] = (
    weakref.WeakValueDictionary()
)


@dataclass(frozen=True, eq=False)
class RowAccess:
    """The rows of the files that a manifest describes."""

    store: Store  # where the files are
    manifest: Manifest  # columns, files and row groups

    @property
    def reader(self) -> Reader:
        """The reader of this process; it lives as long as an access of the process that has used it."""
        key = os.getpid(), id(self.store.filesystem), self.store.url, self._hash
        opened: _OpenReader | None = self.__dict__.get("_opened", {}).get(key)
        if opened is None:
            opened = _open_readers.get(key) or _OpenReader(self.store, self.manifest)
            _open_readers[key] = opened
            self.__dict__["_opened"] = {key: opened}
        return opened.reader

    def take(self, rows: Sequence[int] | Int64s) -> ColumnArrays:
        """Column -> (n, *shape), the values of these rows in their order.

        Raises:
            StoreError: a file is gone, changed or damaged.
        """
        numbers = np.asarray(rows, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.manifest.rows:
            raise InvalidInput(
                f"There is no row {numbers.max()}: the data set has {self.manifest.rows} rows."
            )
        groups = np.searchsorted(self._ends, numbers, "right")
        reader = self.reader
        taken = {
            column.name: np.empty((len(numbers), *column.shape), column.dtype)
            for column in self.manifest.columns
        }
        for group in np.unique(groups):
            places = np.flatnonzero(groups == group)
            inside = numbers[places] - (self._ends[group] - self.manifest.row_groups.rows[group])
            decoded = reader.fetch(int(group))
            for name, out in taken.items():
                out[places] = decoded[name][inside]
            reader.release(int(group))
        return taken

    @cached_property
    def _ends(self) -> Int64s:
        """The number behind the last row of each row group."""
        return np.cumsum(self.manifest.row_groups.rows)

    @cached_property
    def _hash(self) -> str:
        return self.manifest.hash

    def __getstate__(self) -> dict[str, object]:
        return {"store": self.store, "manifest": self.manifest}
