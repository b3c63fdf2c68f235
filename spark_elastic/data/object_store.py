"""An object store: calls of its client, tried again until they succeed or a time is over; files; credentials.

The clients try a single request again by themselves, some for two seconds and some without an end. Here each attempt
has a limit of its own, so that an answer that trickles in or never comes is asked for anew, and all attempts together
have one. Only clients whose calls are coroutines (S3, GCS, Azure) are retried: those of local disks, mounts and HDFS
wait by themselves. Any thread may use a client; its coroutines run in fsspec's thread. A `RemoteFile` belongs to one.

Credentials that have expired are looked up again, and `RenewedFileSystem` asks for others before they end. It pickles
without them: each process asks for its own. Knows no catalog.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import random
import threading
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from fsspec.asyn import AsyncFileSystem

from spark_elastic.clock import SystemClock
from spark_elastic.errors import StoreError

log = logging.getLogger("spark_elastic")

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
        run = getattr(self.filesystem, f"_{method}")
        return self.run(self.retry(lambda: run(*arguments, **options), size, longest))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:  # this thread may be interrupted
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
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
        """The result of the first attempt that succeeds. size: bytes that are written or read. longest: seconds that an
        attempt of many requests may take, which begins before the limit is over; None: a part of the limit. Raises
        TimeoutError with the last error, or as the client."""
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
        """After a refusal: let the client look its credentials up again. False if that does not help.
        session: the client's when the attempt began; another call may have replaced it."""
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


class RemoteFile(io.RawIOBase):
    """Reads from the ranges in memory, and by requests of their own what is in none."""

    def __init__(self, client: RetryingClient, path: str, size: int) -> None:
        super().__init__()
        self._client, self._path, self._size = client, path, size
        self._place = 0
        self.keep({})

    def keep(self, ranges: Mapping[int, bytes]) -> None:
        """Read from these ranges from now on, instead of those before: first byte -> the bytes from there on."""
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
            content = self._find(begin, end)
            if content is None:
                (content,) = self._client.run(self._client.read_ranges(self._path, [(begin, end)]))
            memoryview(buffer)[:count] = content
        self._place = end
        return count

    def readall(self) -> bytes:
        """The rest of the file. That of RawIOBase asks for 8 KiB at a time, by a request for each."""
        return self.read(max(0, self._size - self._place)) or b""

    def _find(self, begin: int, end: int) -> memoryview | bytes | None:
        slot = bisect_right(self._starts, begin) - 1
        if slot < 0:
            return None
        start = self._starts[slot]
        content = self._ranges[start]
        return memoryview(content)[begin - start : end - start] if end <= start + len(content) else None


def coalesce(ranges: Iterable[Range], gap: int) -> list[Range]:
    """The ranges in order; those that are at most `gap` bytes apart become one."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


# ---- credentials that end during a run

# Others are asked for after a part of the time that is left; workers draw it, so that they do not ask all at once.
RENEW_AFTER = (0.7, 0.9)


@dataclass(frozen=True)
class Lease:
    """Credentials for some time."""

    options: Mapping[str, Any] = field(repr=False)  # fsspec's, such as key, secret and token
    ends: float | None  # in seconds since 1970; None: it is not known


class Credentials(Protocol):
    """What gives credentials, again and again; a worker gets it pickled. Its repr has no secrets."""

    @property
    def name(self) -> str: ...  # of what they open

    def fetch(self) -> Lease: ...  # raises ConnectionError if that may succeed later


class RenewedCredentials:
    """The credentials of now."""

    def __init__(self, source: Credentials, lease: Lease | None = None) -> None:
        self.source = source  # where they come from
        self._lock = threading.Lock()
        self._lease, self._renew_at = lease, _choose_renewal(lease)
        self._is_first = lease is None

    def __repr__(self) -> str:
        return f"RenewedCredentials({self.source!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RenewedCredentials, (self.source,)

    @property
    def lease(self) -> Lease | None:
        """That of now; None: it is time to ask for another."""
        return self._lease if self._renew_at is None or _CLOCK.wall() < self._renew_at else None

    def refuse(self, lease: Lease) -> None:
        """The store takes this one no more."""
        with self._lock:
            if lease is self._lease:
                self._lease, self._renew_at = None, 0.0

    def get(self) -> Lease:
        """The lease of now, or the next one; blocks. ConnectionError: nobody answers, and the last is over."""
        with self._lock:
            found = self.lease
            if found is not None:
                return found
            try:
                found = self.source.fetch()
            except Exception as error:
                found = self._lease
                if found is None or found.ends is None or _CLOCK.wall() >= found.ends:
                    if self._is_first or isinstance(error, ConnectionError):
                        raise
                    raise StoreError(f"Credentials have ended and cannot be renewed: {error}") from error
                log.warning("credentials of %r are not renewed yet: %s", self.source, error)
            self._lease, self._renew_at, self._is_first = found, _choose_renewal(found), False
            return found


def _choose_renewal(lease: Lease | None) -> float | None:
    if lease is None:
        return 0.0
    if lease.ends is None:
        return None
    now = _CLOCK.wall()
    # By a clock that is ahead it may be over: the store knows better.
    return now + (lease.ends - now) * random.uniform(*RENEW_AFTER) if lease.ends > now else None


@dataclass(frozen=True)
class RenewedRoot:
    """A folder with the credentials that open it."""

    path: str  # as the client takes it
    client: Callable[..., AsyncFileSystem] = field(repr=False)  # its class
    options: Mapping[str, Any] = field(repr=False)  # of the client, beside those of a lease
    credentials: RenewedCredentials

    def connect(self) -> tuple[Lease, AsyncFileSystem]:
        """A client with the lease of now; blocks."""
        lease = self.credentials.get()
        return lease, self.client(**{**lease.options, **self.options}, skip_instance_cache=True)


class RenewedFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Reads folders of one kind of object store, each with its own credentials. `session` and `set_session` are s3fs's,
    by which `RetryingClient` has others asked for after a refusal."""

    cachable = False

    def __init__(self, *roots: RenewedRoot, **options: Any) -> None:
        super().__init__(**options)
        self.roots, self.protocol = roots, roots[0].client.protocol  # type: ignore[attr-defined]
        self.session: object = None  # another one after each refusal and renewal
        self._connected: dict[str, tuple[Lease, AsyncFileSystem]] = {}  # by path of a root
        self._connecting: dict[str, asyncio.Future[None]] = {}

    async def set_session(self, refresh: bool = False) -> None:
        """Have the next call ask for other credentials."""
        for root in self.roots:
            if root.path in self._connected:
                root.credentials.refuse(self._connected[root.path][0])
        self.session = object()

    def invalidate_cache(self, path: str | None = None) -> None:
        for _, client in list(self._connected.values()):
            client.invalidate_cache(path)

    async def _find_client(self, path: str) -> AsyncFileSystem:
        inside = [root for root in self.roots if f"{path}/".startswith(f"{root.path}/")]
        root = max(inside or self.roots, key=lambda each: len(each.path))
        lease, _ = self._connected.get(root.path, (None, None))
        if lease is None or root.credentials.lease is not lease:
            task = self._connecting.get(root.path)
            if task is None:
                task = self._connecting[root.path] = asyncio.ensure_future(self._connect(root))
                # Whoever waited may have left.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(task)  # an attempt that is over leaves it to the next
        return self._connected[root.path][1]

    async def _connect(self, root: RenewedRoot) -> None:
        thread = ThreadPoolExecutor(1, "credentials")
        try:
            connected = await asyncio.get_running_loop().run_in_executor(thread, root.connect)
        finally:
            del self._connecting[root.path]
            thread.shutdown(wait=False)
        if root.path in self._connected:
            self.session = object()
        self._connected[root.path] = connected


def _make_client_call(method: str) -> Callable[..., Any]:
    async def call(self: RenewedFileSystem, path: str, *arguments: Any, **options: Any) -> Any:
        client = await self._find_client(path)
        return await getattr(client, method)(path, *arguments, **options)

    return call


for _name in ("_info", "_ls", "_find", "_exists", "_cat_file"):
    setattr(RenewedFileSystem, _name, _make_client_call(_name))


def renew(filesystem: Any, root: str, options: Mapping[str, Any], credentials: RenewedCredentials) -> Any:
    """The file system with credentials that are renewed; of others than object stores itself. options: the user's."""
    if not isinstance(filesystem, AsyncFileSystem):
        return filesystem
    given = credentials.get().options
    opened = filesystem.storage_options
    kept = {name: value for name, value in opened.items() if name in options or name not in given}
    return RenewedFileSystem(RenewedRoot(root, type(filesystem), kept, credentials))


def join_filesystems(parts: list[Any]) -> Any:
    """One file system for what is in any of these; None: there is none."""
    if all(each == parts[0] for each in parts):
        return parts[0]
    if all(isinstance(each, RenewedFileSystem) and each.protocol == parts[0].protocol for each in parts):
        return RenewedFileSystem(*(root for each in parts for root in each.roots))
    return None


def find_table(filesystem: Any) -> str | None:
    """The name in its catalog of what a file system with renewed credentials opens; None for others."""
    return filesystem.roots[0].credentials.source.name if isinstance(filesystem, RenewedFileSystem) else None
