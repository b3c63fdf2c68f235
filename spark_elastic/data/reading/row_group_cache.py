"""A cache of decoded row groups, bounded in bytes and by the memory that this process may still take.

Any thread may fetch; one decodes at a time. A bound above DEFAULT_CACHE_BYTES holds only while a quarter of the memory
(of the machine, the container, the address space) is free. Knows no files.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

from spark_elastic.data.reading.decoding import ColumnArrays, nbytes
from spark_elastic.errors import StoreError

NEVER_LIMITED = 1 << 60  # cgroup v1 says "no limit" by a number near 2**63
_CGROUP_FILES = (  # files with the limit, the use, and the table and key of the page cache in it
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def measure_available_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(free bytes, limit in bytes) of the tightest limit; None if none is known. root: of /proc and /sys."""
    found = (_measure_machine(root), _measure_cgroup(root / "sys/fs/cgroup"), _measure_address_space(root))
    return min((room for room in found if room is not None), default=None)


def read_cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of this process's container in bytes; None if it has none."""
    for name, *_ in _CGROUP_FILES:
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < NEVER_LIMITED else None
    return None


def _measure_machine(root: Path) -> tuple[int, int] | None:
    numbers = _read_table(root / "proc/meminfo")
    if "MemAvailable:" not in numbers or "MemTotal:" not in numbers:
        return None
    return numbers["MemAvailable:"] << 10, numbers["MemTotal:"] << 10


def _measure_cgroup(root: Path) -> tuple[int, int] | None:
    limit = read_cgroup_limit(root)
    if limit is None:
        return None
    for _, use, table, cached in _CGROUP_FILES:
        try:
            used = int((root / use).read_text())
        except (OSError, ValueError):
            continue
        return max(0, limit - used + _read_table(root / table).get(cached, 0)), limit
    return None


def _measure_address_space(root: Path) -> tuple[int, int] | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        pages = int((root / "proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, most - pages * os.sysconf("SC_PAGE_SIZE")), most


def _read_table(file: Path) -> dict[str, int]:
    """A name and a number on each line."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


DEFAULT_CACHE_BYTES = 128 << 20  # with it a worker stays below 1 GB: benchmarks/memory.py


FREE_SHARE = 4  # 1/4 of the memory stays free: for activations, checkpoints and other processes

log = logging.getLogger("spark_elastic")


class RowGroupCache:
    """Decoded row groups by number. A row group is in use from `fetch` until `release`.

    Above the bound it evicts the row group that was released last; if all are in use, the one that was fetched before
    the newest. The newest stays even if it exceeds the bound by itself. Epochs read row groups in about the same order:
    the last one used is the last one needed again, while evicting the oldest would leave nothing to reuse.
    """

    def __init__(
        self, limit: int, room: Callable[[], tuple[int, int] | None] = measure_available_memory
    ) -> None:
        """room: gives (free bytes, limit) of the memory; called before the cache grows above the default."""
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
        """A row group from the cache, or decoded now."""
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
        """Decode a row group that will be fetched soon, once no thread waits in `fetch`.

        Returns False if there is no room for it beside those in use.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._decoding and not self._waiting)
            if self._get(group) is not None or self._closed:
                return True
            if not self._has_room():
                return False
            self._decoding = True
        self._decode_and_keep(group, decode)
        return True

    def release(self, group: int | None = None) -> None:
        """End the use of a row group, or of all if it is None."""
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

    def _has_room(self) -> bool:
        return sum(size for _, size in self._in_use.values()) + self._largest <= self._limit

    def _put(self, group: int, rows: ColumnArrays) -> None:
        size = nbytes(rows)
        self._in_use[group] = rows, size
        self._bytes += size
        self._largest = max(self._largest, size)
        if self._allowed < self._bytes <= self._limit:
            self._grow()
        while self._bytes > self._limit and len(self) > 1:
            self._bytes -= self._evict()

    def _evict(self) -> int:
        """Drop one row group and return its bytes."""
        if self._released:
            _, (_, freed) = self._released.popitem()
        else:
            _, freed = self._in_use.pop(list(self._in_use)[-2])
        return freed

    def _grow(self) -> None:
        """Allow the present size if enough memory is free; else limit the cache for good to the last allowed size."""
        room = self._room()
        if room is None or room[0] * FREE_SHARE > room[1]:
            self._allowed = self._bytes
            return
        self._limit = self._allowed
        log.warning(
            "not all rows fit into memory: %d MB of decoded rows are kept, since %d of %d MB are left",
            self._limit >> 20,
            room[0] >> 20,
            room[1] >> 20,
        )
