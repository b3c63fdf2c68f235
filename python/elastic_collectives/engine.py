"""The native engine's face: an endpoint per process, a group per generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from elastic_collectives import _engine
from elastic_collectives.errors import raise_by_cause
from elastic_collectives.group import Array, Group, as_array, as_operand, checked_root, split

Exchange = Callable[[bytes], Sequence[bytes]]
"""Hands in one's own blob and returns everybody's, in rank order; may raise."""

_engine.set_raiser(raise_by_cause)


class Endpoint:
    """The one listening socket of a process, for all its groups.

    key: the job's secret; only its holders may connect. host: what to bind. port_range: ports to choose from, both
    ends included; None: any. advertise: the host name or address that peers dial, default `host`.

    Raises:
        ValueError: an argument makes no sense. RuntimeError: nothing of `port_range` is free on `host`.
    """

    def __init__(
        self,
        key: bytes,
        host: str = "127.0.0.1",
        port_range: tuple[int, int] | None = None,
        advertise: str | None = None,
    ) -> None:
        if not key:
            raise ValueError("key must not be empty: it is what keeps strangers out.")
        if host in ("", "0.0.0.0", "::") and not advertise:
            raise ValueError(
                f"host {host!r} stands for every interface; pass advertise, the address that peers dial."
            )
        first, last = port_range or (0, 0)
        if port_range is not None and not 0 < first <= last <= 65535:
            raise ValueError(f"port_range must be (first, last) within 1 and 65535; got {port_range}.")
        self.native = _engine.Endpoint(key, host, first, last, advertise or "")

    @property
    def address(self) -> str:
        """As peers dial it: "host:port" or "[v6]:port"."""
        return self.native.address

    def close(self) -> None:
        self.native.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    endpoint: Endpoint,
    rank: int,
    size: int,
    fence: tuple[int, int],
    exchange: Exchange,
    timeout: float = 60.0,
    bcube_limit: int = 1 << 20,
) -> Group:
    """Build the group of one generation.

    fence: (attempt, generation); peers of an older one are turned away, of a newer one kept waiting.
    exchange: called once with this rank's blob. timeout: seconds that one wait for a peer may last (two
    more where all of them are alive and wait in their turn), 0.001 or more.
    bcube_limit: bytes up to which allreduce takes bcube, above it the ring.

    Raises:
        ValueError: rank, size, timeout or the number of blobs make no sense. RuntimeError: the endpoint is closed.
        Whatever `exchange` raises.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}); got {rank}.")
    if not 0.001 <= timeout <= 1e9:
        raise ValueError(f"timeout must be seconds within 0.001 and 1e9; got {timeout}.")
    blobs = exchange(endpoint.address.encode())
    if len(blobs) != size:
        raise ValueError(f"the exchange returned {len(blobs)} blobs for {size} ranks.")
    peers = [blob.decode() for blob in blobs]
    native = _engine.Group(endpoint.native, rank, peers, fence, timeout, bcube_limit)
    return EngineGroup(native, rank, size, fence)


class EngineGroup:
    """`Group` over the native engine. A lone rank needs no sockets: its collectives are the identity."""

    def __init__(self, native: _engine.Group, rank: int, size: int, fence: tuple[int, int]) -> None:
        self._native = native
        self.rank = rank
        self.size = size
        self.fence = fence

    def allreduce(self, array: Any, op: str = "sum", algorithm: str = "auto") -> None:
        view = as_operand(array, op, algorithm)
        if self._trivial(view.size):
            return
        dtype, reduce = getattr(_engine.DataType, view.dtype.name), getattr(_engine.ReduceOp, op)
        self._native.allreduce(view, view.size, view.nbytes, dtype, reduce, algorithm)

    def broadcast(self, array: Any, root: int) -> None:
        view = as_array(array, writable=self.rank != root)
        checked_root(root, self.size)
        if not self._trivial(view.size):
            data = view if view.flags.writeable else view.copy()
            self._native.broadcast(data, data.nbytes, root)

    def allgather(self, array: Any) -> Array:
        view = as_array(array, writable=False)
        gathered = np.empty((self.size, *view.shape), view.dtype)
        if self._trivial(view.size):
            gathered[0:1] = view
            return gathered
        self._native.allgather(view, gathered, [view.nbytes] * self.size)
        return gathered

    def allgatherv(self, array: Any) -> list[Array]:
        view = as_array(array, writable=False)
        lengths = self.allgather(np.array([len(view)], np.int64)).ravel().tolist()
        gathered = np.empty((sum(lengths), *view.shape[1:]), view.dtype)
        row = view.dtype.itemsize * int(np.prod(view.shape[1:], dtype=np.int64))
        if self.size == 1:
            gathered[:] = view
        elif gathered.size:
            self._native.allgather(view, gathered, [length * row for length in lengths])
        return split(gathered, lengths)

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [part.tobytes() for part in self.allgatherv(np.frombuffer(data, np.uint8))]

    def barrier(self) -> None:
        if not self._trivial(1):
            self._native.barrier()

    def abort(self, reason: str) -> None:
        self._native.abort(reason)

    def close(self) -> None:
        self._native.close()

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _trivial(self, elements: int) -> bool:
        """Whether there is nothing to exchange; a failed group fails even then."""
        self._native.check()
        return self.size == 1 or elements == 0
