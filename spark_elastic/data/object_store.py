"""An object store: calls of its client, tried again until they succeed or a time limit is over; objects as files.

The clients try a single request again by themselves, some for two seconds and some without an end. This module bounds
them: each attempt has a limit of its own, so that an answer that trickles in or never comes is asked for anew, and all
attempts together have one. Credentials that have expired are looked up again. Only clients whose calls are coroutines
(S3, GCS, Azure) are retried: those of local disks, mounts and HDFS wait by themselves. Any thread may use a client; the
coroutines run in fsspec's thread. A `RemoteFile` belongs to one thread.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fsspec.asyn import AsyncFileSystem

from spark_elastic.clock import SystemClock

RETRY_SECONDS = 60.0
ATTEMPTS = 6  # an attempt may take this part of the limit
BYTES_PER_SECOND = 1 << 20  # limits are longer by the time that an object or range takes at this rate
RANGE_BYTES = 8 << 20  # larger ranges are read in parts
IN_FLIGHT = 8  # ranges of one call that are read at once
LONGEST_PAUSE = 5.0

_CLOCK = SystemClock()
_BUSY = {
    errno.EAGAIN, errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED,
    errno.ECONNABORTED, errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH,
}  # fmt: skip
_BUSY_STATUS = {408, 429, 500, 502, 503, 504}
# Classes of aiohttp, botocore and azure-core for hosts out of reach, and answers that broke off or never came.
_BROKEN = {
    "aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "aiohttp.ServerDisconnectedError",
    "botocore.HTTPClientError", "botocore.ResponseParserError", "botocore.EndpointConnectionError",
    "botocore.ConnectTimeoutError", "botocore.ProxyConnectionError",
    "azure.ServiceRequestError", "azure.ServiceResponseError", "azure.IncompleteReadError",
}  # fmt: skip

T = TypeVar("T")
Range = tuple[int, int]


@dataclass(frozen=True)
class RetryingClient:
    """An fsspec file system whose calls are coroutines, with the limit of its retries."""

    filesystem: AsyncFileSystem  # its coroutines run in fsspec's thread
    seconds: float  # how long a call is tried, beside the time that its bytes take at BYTES_PER_SECOND

    def call(
        self, method: str, *arguments: Any, size: int = 0, longest: float | None = None, **options: Any
    ) -> Any:
        """A method of the file system. size, longest: see `retry`.

        Raises:
            TimeoutError: no attempt succeeded within the limit; it names the last error. Else what the client raises.
        """
        run = getattr(self.filesystem, f"_{method}")
        return self.run(self.retry(lambda: run(*arguments, **options), size, longest))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, awaited in fsspec's thread while this one waits."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:  # this thread may be interrupted
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in fsspec's thread, for a thread to wait for."""
        return asyncio.run_coroutine_threadsafe(work, self.filesystem.loop)

    async def read_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes `first ... behind the last` of each range, several read at once; each is retried by itself."""
        parts = [
            (place, (start, min(start + RANGE_BYTES, end)))
            for place, (first, end) in enumerate(ranges)
            for start in range(first, end, RANGE_BYTES)
        ]
        room = asyncio.Semaphore(IN_FLIGHT)

        async def read(part: Range) -> bytes:
            async with room:
                return await self.retry(lambda: self._read_range(path, part), part[1] - part[0])

        found = await gather([read(part) for _, part in parts])
        if len(parts) == len(ranges):
            return found
        joined: list[list[bytes]] = [[] for _ in ranges]
        for (place, _), content in zip(parts, found, strict=True):
            joined[place].append(content)
        return [b"".join(each) for each in joined]

    def remove(self, objects: Sequence[str], folders: Sequence[str]) -> None:
        """Delete objects, and then the folders that were made for them; each object's request is retried by itself."""

        async def delete(path: str, room: asyncio.Semaphore) -> None:
            async with room:
                with suppress(FileNotFoundError):
                    await self.retry(lambda: self.filesystem._rm_file(path))

        async def remove() -> None:
            room = asyncio.Semaphore(IN_FLIGHT)
            await gather([delete(path, room) for path in objects])
            # Most stores have no folders, some have them as objects, and Azure's and Google's may have real ones.
            for method in ("_rm_file", "_rmdir"):
                for path in folders:
                    with suppress(Exception):  # an empty folder does no harm
                        await getattr(self.filesystem, method)(path)

        self.run(remove())

    async def read_object(self, path: str) -> bytes:
        """All of an object. A small one is read by one request, so that it is never half of another version."""
        size = await self.find_size(path)
        if size > RANGE_BYTES:
            return (await self.read_ranges(path, [(0, size)]))[0]
        return cast("bytes", await self.retry(lambda: self.filesystem._cat_file(path), size))

    async def read_tail(self, path: str, length: int) -> tuple[int, bytes]:
        """The size of an object, and its last `length` bytes, or all of a shorter one."""
        size = await self.find_size(path)
        return size, (await self.read_ranges(path, [(max(0, size - length), size)]))[0]

    async def find_size(self, path: str) -> int:
        """Bytes of an object."""
        return int((await self.retry(lambda: self.filesystem._info(path)))["size"])

    async def _read_range(self, path: str, part: Range) -> bytes:
        start, end = part
        content = await self.filesystem._cat_file(path, start=start, end=end)
        if len(content) != end - start:
            raise ConnectionError(f"{len(content)} of {end - start} bytes came")
        return cast("bytes", content)

    async def retry(
        self, attempt: Callable[[], Awaitable[T]], size: int = 0, longest: float | None = None
    ) -> T:
        """The result of the first attempt that succeeds; raises as `call`.

        Args:
            size: bytes that are written or read.
            longest: seconds that an attempt of many requests may take, which begins before the limit is over; None: an
                attempt takes a part of the limit.
        """
        transfer = size / BYTES_PER_SECOND
        deadline = _CLOCK.now() + self.seconds + transfer
        tried = 0
        while True:
            tried += 1
            session = getattr(self.filesystem, "session", None)
            try:
                limit = longest or min(self.seconds / ATTEMPTS + transfer, deadline - _CLOCK.now())
                return await asyncio.wait_for(attempt(), max(0.0, limit))
            except Exception as error:
                if not (_is_transient(error) or await self._renew_credentials(error, session, tried)):
                    raise
                pause = min(0.1 * 2**tried, LONGEST_PAUSE) * random.uniform(0.5, 1)
                if _CLOCK.now() + pause >= deadline:
                    reason = str(error) or "no answer in time"
                    raise TimeoutError(
                        f"{tried} attempts in {self.seconds + transfer:.0f} s failed, the last with "
                        f"{type(error).__name__}: {reason}"
                    ) from error
            await asyncio.sleep(pause)

    async def _renew_credentials(self, error: Exception, session: object, tried: int) -> bool:
        """After a refusal: let the client look its credentials up again, in files, variables or a process. False if
        that does not help. session: the client's when the attempt began; another call may have replaced it."""
        if not isinstance(error, PermissionError) or not hasattr(self.filesystem, "set_session"):
            return False
        if getattr(self.filesystem, "key", None) or getattr(self.filesystem, "anon", False):
            return False  # given as they are
        # The answer to HEAD has no text.
        if "expired" not in str(error).lower() and tried > 1:
            return False
        if self.filesystem.session is session:
            await self.filesystem.set_session(refresh=True)
        return True


async def gather(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    # FileNotFoundError and others that say what is wrong are OSErrors with another errno.
    if isinstance(error, TimeoutError | asyncio.TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _BUSY:
        return True
    for attribute in ("status", "status_code", "code"):
        status = getattr(error, attribute, None)
        if str(status).isdigit() and int(str(status)) in _BUSY_STATUS:
            return True
    names = {f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(error).__mro__}
    return bool(names & _BROKEN)


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
