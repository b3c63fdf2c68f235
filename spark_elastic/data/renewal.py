"""Credentials of an object store that end during a run, and a file system that asks for others before they do.

`RenewedCredentials` holds those of now, for any thread. `RenewedFileSystem` reads with them, in fsspec's thread, and
makes its client anew with the next ones. Both pickle without the credentials: each process asks for its own. Knows no
catalog.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsspec.asyn import AsyncFileSystem

from spark_elastic.clock import SystemClock
from spark_elastic.errors import StoreError

log = logging.getLogger("spark_elastic")

# Others are asked for after a part of the time that is left; workers draw it, so that they do not ask all at once.
RENEW_AFTER = (0.7, 0.9)

_CLOCK = SystemClock()


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
        """The lease of now, or the next one; blocks. Raises ConnectionError if nobody answers and the last lease is
        over, StoreError if there are no others."""
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
    """Reads folders of one kind of object store, each with its own credentials.

    `session` and `set_session` are those of s3fs, by which `RetryingClient` has others asked for after a refusal.
    """

    cachable = False

    def __init__(self, *roots: RenewedRoot, **options: Any) -> None:
        super().__init__(**options)
        self.roots, self.protocol = roots, roots[0].client.protocol  # type: ignore[attr-defined]
        self.session: object = None  # another one after each refusal and renewal
        # Path of a root -> its lease and client, and what makes the next ones.
        self._connected: dict[str, tuple[Lease, AsyncFileSystem]] = {}
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
