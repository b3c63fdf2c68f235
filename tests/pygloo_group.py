"""`Group` over pygloo, Ray's binding of Gloo, which has wheels for CPython up to 3.10: a cross-check of our engine.

Sums, minima, maxima and products of dtypes that pygloo supports use its allreduce; everything else is gathered by
pygloo and computed in numpy. It lacks a key (any process that reaches its ports can connect), subgroups, shared memory
and a configurable timeout (a wait lasts 30 s). It holds the interpreter lock during a call, so that
`abort` from another thread takes effect after that call. Main thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pygloo

from elastic_collectives.engine import Exchange, WaitObserver
from elastic_collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    MismatchError,
    PeerLost,
)
from elastic_collectives.operands import Array, Reduction, signature
from tests.fake_group import FakeGroup
from tests.reductions import scale_and_divide

BCUBE_LIMIT = 1 << 20  # bytes up to which "auto" takes bcube
TIMEOUT = 30.0  # seconds; fixed, since pygloo's setter accepts no Python number
DTYPES = {
    name: getattr(pygloo.glooDataType_t, f"gloo{name.capitalize()}")
    for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
}
OPS = {name: getattr(pygloo.ReduceOp, name.upper()) for name in ("sum", "min", "max", "product")}
OPS["average"] = pygloo.ReduceOp.SUM


def connect(host: str, rank: int, size: int, fence: tuple[int, int], exchange: Exchange) -> PyglooGroup:
    """Build the group of one generation, over sockets of `host`, an address of this machine that the peers dial.
    exchange: called once with this rank's blob; returns all ranks', in rank order."""
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}); got {rank}.")
    context = pygloo.rendezvous.Context(rank, size)
    device = pygloo.transport.tcp.CreateDevice(pygloo.transport.tcp.attr(host))
    store = _ExchangeStore(exchange)
    group = PyglooGroup(context, rank, size, fence)
    group.call_guarded(context.connectFullMesh, pygloo.rendezvous.CustomStore(store), device)
    group.verify_generation()
    return group


class _ExchangeStore:
    """The store that pygloo asks for. It writes the host name under rank_N, then this rank's addresses under N."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._host = b""
        self._blobs: Sequence[bytes] = ()

    def set(self, key: str, value: bytes) -> None:
        if key.startswith("rank_"):
            self._host = value
        else:
            self._blobs = self._exchange(bytes(value))

    def get(self, key: str) -> bytes:
        # Host names select one of several devices; there is only one.
        return self._host if key.startswith("rank_") else self._blobs[int(key)]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Return at once: `set` fetched everything."""

    def delKeys(self, keys: Sequence[str]) -> None:
        """Do nothing: the exchange stores nothing."""


class PyglooGroup(FakeGroup):
    """One rank's `Group`."""

    timeout = TIMEOUT

    def __init__(self, context: Any, rank: int, size: int, fence: tuple[int, int]) -> None:
        self._context = context
        self.rank, self.size, self.members, self.fence = rank, size, range(size), fence
        self._failure: CollectiveError | None = None

    def verify_generation(self) -> None:
        """Raise MismatchError unless all ranks have this generation's fence."""
        self._exchange_parts(("fence", *self.fence), np.empty(0))

    def buffer(self, nbytes: int) -> Array:
        self._check()
        return np.zeros(nbytes, np.uint8)

    def subgroup(self, channel: int, ranks: Sequence[int] | None = None) -> PyglooGroup:
        raise ValueError("pygloo has no subgroups: connect another group, or use the native engine.")

    def set_timeout(self, seconds: float | None) -> None:
        """Do nothing: Gloo's own timeout applies."""

    def watch(self, callback: WaitObserver | None) -> None:
        """Do nothing: a callback cannot run while pygloo holds the interpreter lock."""

    def abort(self, reason: str) -> None:
        self._fail(GroupAborted((self.rank,), reason))

    def close(self) -> None:
        self._fail(GroupAborted((self.rank,), f"rank {self.rank}: the group is closed"))

    def call_guarded(self, call: Any, *arguments: Any) -> None:
        """Call pygloo; an error closes the group and its connections, so that the peers fail, too."""
        self._check()
        try:
            call(*arguments)
        except RuntimeError as error:
            text = f"rank {self.rank}: pygloo: {error}"
            failure = (CollectiveTimeout if "imed out" in text else PeerLost)((), text)
            self._fail(failure)
            raise failure from error

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(self._failure.ranks, self._failure.reason)

    def _fail(self, error: CollectiveError) -> None:
        if self._failure is None:
            self._failure = error
            self._context.closeConnections()

    def _exchange_parts(self, call: tuple[Any, ...], part: Array) -> list[Array]:
        rows = part.shape[0] if part.ndim else 1
        heads = self._allgather_equal(np.array([signature(*call), part.nbytes, rows], np.int64))
        for rank, (called, _, _) in enumerate(heads.tolist()):
            if called != heads[0, 0]:
                reason = f"rank {rank} called another collective than rank 0: {call} here"
                error = MismatchError((0, rank), reason)
                self._fail(error)
                raise error
        sizes = heads[:, 1].tolist()
        padded = np.zeros(max(sizes), np.uint8)
        padded[: part.nbytes] = part.reshape(-1).view(np.uint8)
        found = self._allgather_equal(padded) if max(sizes) else np.zeros((self.size, 0), np.uint8)
        shapes = [(count, *part.shape[1:]) if part.ndim else () for count in heads[:, 2].tolist()]
        return [
            found[rank, : sizes[rank]].copy().view(part.dtype).reshape(shapes[rank])
            for rank in range(self.size)
        ]

    def _allgather_equal(self, array: Array) -> Array:
        """Gather arrays of equal shape: (size, *shape)."""
        found = np.empty((self.size, *array.shape), array.dtype)
        count, kind = array.size, DTYPES[array.dtype.name]
        self.call_guarded(pygloo.allgather, self._context, array.ctypes.data, found.ctypes.data, count, kind)
        return found

    def _fold_parts(self, call: tuple[Any, ...], part: Array, dtype: str, reduction: Reduction) -> Array:
        # reducescatter sums in rank order, pygloo's ring does not.
        known = dtype in DTYPES and reduction.op in OPS
        if call[0] != "allreduce" or not known or not part.size:
            return super()._fold_parts(call, part, dtype, reduction)
        self._exchange_parts(call, np.empty(0))  # detects ranks that disagree
        asked = reduction.algorithm
        bcube = asked == "bcube" or (asked == "auto" and part.nbytes <= BCUBE_LIMIT)
        way = pygloo.allreduceAlgorithm.BCUBE if bcube else pygloo.allreduceAlgorithm.RING
        source, result = np.ascontiguousarray(part), np.empty_like(part)
        places = source.ctypes.data, result.ctypes.data, part.size
        self.call_guarded(pygloo.allreduce, self._context, *places, DTYPES[dtype], OPS[reduction.op], way)
        return scale_and_divide(result, reduction.after, self.size if reduction.op == "average" else 1)
