"""Decoded row groups, bounded in bytes: those that nobody reads from any more are the first to go.

Owns the memory of a reader and the order of its threads: any may fetch, one decodes at a time. A bound above
DEFAULT_CACHE_BYTES is what the cache may come to while a quarter of the memory is left. Knows no files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spark_elastic.data.reading.decoding import nbytes
from spark_elastic.data.reading.host_memory import left
from spark_elastic.data.reading.reader import Decoded
from spark_elastic.errors import StoreError

DEFAULT_CACHE_BYTES = 128 << 20  # with it a worker stays below 1 GB: benchmarks/memory.py


KEPT_FREE = 4  # one part in so many of the memory: for activations, checkpoints and others on the host

log = logging.getLogger("spark_elastic")


class DecodedGroups:
    """A cache of decoded row groups by number. They are in use from when they are fetched until they are released.

    If there are too many bytes, the one released last goes first, and when all are in use the one fetched last before
    the newest, which stays even if it exceeds the bound by itself. Rows are read over and over in about one order:
    what was wanted last is wanted last again, and if the oldest went, nothing would stay until its turn comes.
    """

    def __init__(self, limit: int, room: Callable[[], tuple[int, int] | None] = left) -> None:
        """room: (bytes of memory left, of how many), looked at before the cache grows above the default."""
        self._limit, self._room = limit, room
        self._allowed = DEFAULT_CACHE_BYTES  # and more where there was room for it
        self._lock = threading.Lock()
        self._decoding = threading.Lock()
        self._in_use: dict[int, tuple[Decoded, int]] = {}
        self._released: dict[int, tuple[Decoded, int]] = {}
        self._bytes = 0
        self._largest = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._in_use) + len(self._released)

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

    def prefetch(self, group: int, decode: Callable[[int], Decoded]) -> bool:
        """Decode a row group that will be fetched soon. False if there is no room for it beside those in use."""
        with self._decoding:
            if self._get(group) is None and not self._closed:
                if not self._has_room():
                    return False
                self._put(group, decode(group))
            return True

    def release(self, group: int | None = None) -> None:
        """Nobody reads from it any more, nor from any where it is None."""
        with self._lock:
            if group is None:
                self._released.update(self._in_use)
                self._in_use.clear()
            elif group in self._in_use:
                self._released[group] = self._in_use.pop(group)

    def close(self, let_go: Callable[[], None]) -> None:
        """Wait for a decoding thread, then forget everything and call `let_go`; nothing is decoded any more."""
        with self._decoding:
            self._closed = True
            let_go()
            with self._lock:
                self._in_use.clear()
                self._released.clear()
                self._bytes = 0

    def _get(self, group: int) -> Decoded | None:
        with self._lock:
            entry = self._in_use.pop(group, None) or self._released.pop(group, None)
            if entry is None:
                return None
            self._in_use[group] = entry
            return entry[0]

    def _has_room(self) -> bool:
        with self._lock:
            return sum(size for _, size in self._in_use.values()) + self._largest <= self._limit

    def _put(self, group: int, rows: Decoded) -> None:
        with self._lock:
            size = nbytes(rows)
            self._in_use[group] = rows, size
            self._bytes += size
            self._largest = max(self._largest, size)
            if self._allowed < self._bytes <= self._limit:
                self._grow()
            while self._bytes > self._limit and len(self) > 1:
                self._bytes -= self._dropped()

    def _dropped(self) -> int:
        """Forget one; its bytes."""
        if self._released:
            _, (_, freed) = self._released.popitem()
        else:
            _, freed = self._in_use.pop(list(self._in_use)[-2])
        return freed

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
