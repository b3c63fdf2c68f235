"""The Python side of the native engine: one endpoint per process, one group per generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

from elastic_collectives import _engine
from elastic_collectives._engine import await_exit as await_exit
from elastic_collectives._engine import is_exiting as is_exiting
from elastic_collectives.errors import raise_by_cause
from elastic_collectives.group import MAX_TIMEOUT, MIN_TIMEOUT, Closing, FindAddresses, Group, GroupSpec

Exchange = Callable[[bytes], Sequence[bytes]]
"""Publishes this rank's blob and returns the blobs of all ranks, in rank order; may raise."""

log = logging.getLogger("elastic_collectives")


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """Log each sentence once per process, although every generation may repeat it."""
    log.warning("%s", text)


_engine.set_error_raiser(raise_by_cause)
_engine.set_warning_handler(_warn_once)


class Endpoint(Closing):
    """The one listening socket of a process, for all its groups.

    Args:
        key: the job's secret; only processes that hold it can connect.
        host: the address to bind.
        port_range: ports to choose from, both ends included; None for any free port.
        advertise: the host name or address that peers dial; defaults to `host`.
        encrypted: whether connections use TLS 1.3 with the key as pre-shared key. All ranks must agree. Uses the
            system's OpenSSL.

    Raises:
        ValueError: an argument is invalid.
        RuntimeError: no port of `port_range` is free on `host`, or OpenSSL is missing.
    """

    def __init__(
        self,
        key: bytes,
        host: str = "127.0.0.1",
        port_range: tuple[int, int] | None = None,
        advertise: str | None = None,
        encrypted: bool = False,
    ) -> None:
        if not key:
            raise ValueError("key must not be empty: without one any process could join the group.")
        if host in ("", "0.0.0.0", "::") and not advertise:
            raise ValueError(
                f"host {host!r} stands for every interface; pass advertise, the address that peers dial."
            )
        first, last = port_range or (0, 0)
        if port_range is not None and not 0 < first <= last <= 65535:
            raise ValueError(f"port_range must be (first, last) within 1 and 65535; got {port_range}.")
        if encrypted:
            import ssl  # noqa: F401  # so that Python's own OpenSSL, where it is a library of its own, is the one found
        self.native = _engine.Endpoint(key, host, first, last, advertise or "", encrypted)
        self.encrypted = encrypted

    @property
    def address(self) -> str:
        """As peers dial it: "host:port" or "[v6]:port"."""
        return self.native.address

    def close(self) -> None:
        self.native.close()


def connect(  # noqa: PLR0913 - what a group is made of
    endpoint: Endpoint,
    rank: int,
    size: int,
    fence: tuple[int, int],
    exchange: Exchange,
    timeout: float = 60.0,
    local_ranks: Sequence[int] | None = None,
    find_addresses: FindAddresses | None = None,
) -> Group:
    """Build the group of one generation.

    Args:
        fence: (attempt, generation). Peers with an older fence are refused, peers with a newer one wait.
        exchange: called once with this rank's blob. With `find_addresses`, blobs may be empty.
        timeout: seconds that one wait for a peer may last, 0.001 or more; two seconds more if every peer is alive and
            waits itself.
        local_ranks: the ranks on this rank's host, including this one. They use shared memory if all of them can map
            it. None (on all ranks or on none): all traffic goes through sockets.
        find_addresses: asked in the midst of a collective that is the first to need them.

    Raises:
        ValueError: rank, size, local_ranks, timeout or the number of blobs is invalid.
        RuntimeError: the endpoint is closed.
        Exception: any error of `exchange`.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}); got {rank}.")
    if not MIN_TIMEOUT <= timeout <= MAX_TIMEOUT:
        raise ValueError(f"timeout must be seconds within {MIN_TIMEOUT} and {MAX_TIMEOUT:g}; got {timeout}.")
    local = sorted(local_ranks or ())
    if local and (rank not in local or len(set(local)) < len(local) or not 0 <= local[0] <= local[-1] < size):
        raise ValueError(f"local_ranks must be ranks in [0, {size}), {rank} among them; got {local_ranks}.")
    blobs = exchange(endpoint.address.encode())
    if len(blobs) != size:
        raise ValueError(f"the exchange returned {len(blobs)} blobs for {size} ranks.")
    peers = [blob.decode() for blob in blobs]
    return Group(GroupSpec(endpoint, peers, range(size), fence, timeout, local, find_addresses), rank)
