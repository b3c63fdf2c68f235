"""An object of an object store as a file, of which some ranges are in memory. Knows no file format; one thread."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping

from spark_elastic.data.retries import Range, RetryingClient

TAIL_BYTES = 64 << 10  # one read gets nearly every footer of Parquet


class RemoteFile(io.RawIOBase):
    """Reads from the ranges in memory, and by requests of their own what is in none."""

    def __init__(self, client: RetryingClient, path: str, size: int, ranges: Mapping[int, bytes]) -> None:
        """ranges: first byte -> the bytes from there on; they do not overlap."""
        super().__init__()
        self._client, self._path, self._size = client, path, size
        self._place = 0
        self.keep(ranges)

    @classmethod
    def open(cls, client: RetryingClient, path: str) -> RemoteFile:
        """Reads nothing but the object's size."""
        return cls(client, path, client.run(client.find_size(path)), {})

    def keep(self, ranges: Mapping[int, bytes]) -> None:
        """Read from these ranges from now on, instead of those before."""
        self._ranges = ranges
        self._starts = sorted(ranges)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(0, origin + offset)
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the buffer unless the file ends before."""
        count = max(0, min(len(buffer), self._size - self._place))
        begin, end = self._place, self._place + count
        if count:
            found = self._find(begin, end)
            if found is None:
                (found,) = (memoryview(each) for each in self._client.run(self._read(begin, end)))
            memoryview(buffer)[:count] = found
        self._place = end
        return count

    def readall(self) -> bytes:
        """The rest of the file. That of RawIOBase asks for 8 KiB at a time, by a request for each."""
        return self.read(max(0, self._size - self._place)) or b""

    def _find(self, begin: int, end: int) -> memoryview | None:
        """The bytes if they are in memory."""
        slot = bisect_right(self._starts, begin) - 1
        if slot < 0:
            return None
        start = self._starts[slot]
        content = self._ranges[start]
        return memoryview(content)[begin - start : end - start] if end <= start + len(content) else None

    async def _read(self, begin: int, end: int) -> list[bytes]:
        return await self._client.read_ranges(self._path, [(begin, end)])


def coalesce(ranges: Iterable[Range], gap: int) -> list[Range]:
    """The ranges in order; those that are at most `gap` bytes apart become one."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
