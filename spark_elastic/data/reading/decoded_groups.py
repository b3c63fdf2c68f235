"""Decoded row groups, least recently used first out, bounded in bytes.

Owns the memory of a reader and the order of its threads: any may fetch, one decodes at a time. A bound above
DEFAULT_CACHE_BYTES is what the cache may come to while a quarter of the memory is left. Knows no files.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from spark_elastic.data.reading.decoding import nbytes
from spark_elastic.data.reading.host_memory import left
from spark_elastic.data.reading.reader import Decoded
from spark_elastic.errors import StoreError

DEFAULT_CACHE_BYTES = 128 << 20  # with it a worker stays below 1 GB: benchmarks/memory.py


KEPT_FREE = 4  # one part in so many of the memory: for activations, checkpoints and others on the host

log = logging.getLogger("spark_elastic")


class DecodedGroups:
    """A cache of decoded row groups by number. The newest stays even if it exceeds the bound by itself."""

    def __init__(self, limit: int, room: Callable[[], tuple[int, int] | None] = left) -> None:
        """room: (bytes of memory left, of how many), looked at before the cache grows above the default."""
        self._limit, self._room = limit, room
        self._allowed = DEFAULT_CACHE_BYTES  # and more where there was room for it
        self._lock = threading.Lock()
        self._decoding = threading.Lock()
        self._groups: OrderedDict[int, tuple[Decoded, int]] = OrderedDict()
        self._bytes = 0
        self._closed = False

    def fetch(self, group: int, decode: Callable[[int], Decoded]) -> Decoded:
        """A row group from memory, or decoded now."""
        found = self._get(group)
        if found is not None:
            return found
        with self._decoding:
            # Another thread may have decoded it while this one waited.
            found = self._get(group)
            if found is None:
                if self._closed:
                    raise StoreError("The reader is closed: open a new one.")
                found = decode(group)
                self._put(group, found)
            return found

    def close(self, let_go: Callable[[], None]) -> None:
        """Wait for a decoding thread, then forget everything and call `let_go`; nothing is decoded any more."""
        with self._decoding:
            self._closed = True
            let_go()
            with self._lock:
                self._groups.clear()
                self._bytes = 0

    def _get(self, group: int) -> Decoded | None:
        with self._lock:
            if group not in self._groups:
                return None
            self._groups.move_to_end(group)
            return self._groups[group][0]

    def _put(self, group: int, rows: Decoded) -> None:
        with self._lock:
            self._groups[group] = rows, nbytes(rows)
            self._bytes += self._groups[group][1]
            if self._allowed < self._bytes <= self._limit:
                self._grow()
            while self._bytes > self._limit and len(self._groups) > 1:
                self._bytes -= self._groups.popitem(last=False)[1][1]

    def _grow(self) -> None:
        """Allow what the cache holds while enough memory is left; else limit it for good to what was allowed last."""
        room = self._room()
        if room is None or room[0] * KEPT_FREE > room[1]:
            self._allowed = self._bytes
            return
        self._limit = self._allowed
        log.warning(
            "not all rows fit into memory: %d MB of decoded rows are kept, since %d of %d MB are left",
            self._limit >> 20,
            room[0] >> 20,
            room[1] >> 20,
        )
