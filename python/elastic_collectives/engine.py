"""The native engine's face: an endpoint per process, a group per generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from elastic_collectives import _engine
from elastic_collectives.errors import CollectiveError, GroupAborted, raise_by_cause
from elastic_collectives.group import Array, Group, as_array, split

Exchange = Callable[[bytes], Sequence[bytes]]
"""Hands in one's own blob and returns everybody's, in rank order; may raise."""

DTYPES = ("float32", "float64", "int32", "int64")
OPS = ("sum", "min", "max", "product")
ALGORITHMS = ("auto", "ring", "bcube")

_engine.set_raiser(raise_by_cause)


class Endpoint:
    """The one listening socket of a process, for all its groups.

    key: the job's secret; only its holders may connect. host: what to bind. port_range: ports to choose from, both
    ends included; None: any. advertise: the host name or address that peers dial, default `host`.
    """

    def __init__(
        self,
        key: bytes,
        host: str = "127.0.0.1",
        port_range: tuple[int, int] | None = None,
        advertise: str | None = None,
    ) -> None:
        first, last = port_range or (0, 0)
        self.native = _engine.Endpoint(key, host, first, last, advertise or "")

    @property
    def address(self) -> str:
        """"host:port" or "[v6]:port", as peers dial it."""
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
    exchange: called once with this rank's blob. timeout: seconds that one wait for a peer may last.
    bcube_limit: bytes up to which allreduce takes bcube, above it the ring.

    Raises:
        ValueError: rank, size or the number of blobs make no sense. Whatever `exchange` raises.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}); got {rank}.")
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
        self._aborted: str | None = None

    def allreduce(self, array: Any, op: str = "sum", algorithm: str = "auto") -> None:
        view = as_array(array, writable=True)
        if view.dtype.name not in DTYPES:
            raise ValueError(f"allreduce takes {', '.join(DTYPES)}; got {view.dtype.name}.")
        if op not in OPS or algorithm not in ALGORITHMS:
            raise ValueError(f"op must be one of {OPS} and algorithm one of {ALGORITHMS}; got {op!r}, {algorithm!r}.")
        if self._trivial(view.size):
            return
        dtype, reduce = getattr(_engine.DataType, view.dtype.name), getattr(_engine.ReduceOp, op)
        self._native.allreduce(view, view.size, view.nbytes, dtype, reduce, algorithm)

    def broadcast(self, array: Any, root: int) -> None:
        view = as_array(array, writable=self.rank != root)
        if not 0 <= root < self.size:
            raise ValueError(f"root must be in [0, {self.size}); got {root}.")
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
        if self._aborted is None:
            self._aborted = reason
        self._native.abort(reason)

    def close(self) -> None:
        if self._aborted is None:
            self._aborted = "the group is closed"
        self._native.close()

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _trivial(self, elements: int) -> bool:
        """Whether there is nothing to exchange; an aborted group fails even then."""
        if self._aborted is not None and (self.size == 1 or elements == 0):
            raise GroupAborted((), self._aborted)
        return self.size == 1 or elements == 0


__all__ = ["CollectiveError", "Endpoint", "EngineGroup", "Exchange", "connect"]
