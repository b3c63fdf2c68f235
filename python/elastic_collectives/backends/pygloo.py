"""`Group` over pygloo, Ray's binding of Gloo, which has wheels for CPython up to 3.10: a cross-check of our engine.

Sums, minima, maxima and products of the dtypes that it knows are pygloo's own allreduce; everything else is gathered by
it and computed in numpy. What it lacks: a key (whoever reaches its ports may connect), subgroups, shared memory, a
timeout of one's own (a wait lasts 30 s), and it holds the interpreter's lock for as long as a call lasts, so that
`abort` from another thread takes effect after that call. Main thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pygloo

from elastic_collectives.arithmetic import scaled
from elastic_collectives.engine import BCUBE_LIMIT, Exchange
from elastic_collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    MismatchError,
    PeerLost,
)
from elastic_collectives.gathering import GatheringGroup
from elastic_collectives.group import Array, Watch
from elastic_collectives.operands import Reduction, signature

TIMEOUT = 30.0  # seconds, Gloo's; its setter takes no number that Python could hand over
DTYPES = {
    name: getattr(pygloo.glooDataType_t, f"gloo{name.capitalize()}")
    for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
}
OPS = {
    "sum": pygloo.ReduceOp.SUM,
    "average": pygloo.ReduceOp.SUM,
    "min": pygloo.ReduceOp.MIN,
    "max": pygloo.ReduceOp.MAX,
    "product": pygloo.ReduceOp.PRODUCT,
}


def connect(host: str, rank: int, size: int, fence: tuple[int, int], exchange: Exchange) -> PyglooGroup:
    """Build the group of one generation, over sockets of `host`, an address of this machine that the peers dial.

    exchange: called once with this rank's blob; returns all ranks', in rank order.

    Raises:
        ValueError: rank and size make no sense. MismatchError: a rank is of another generation.
        PeerLost, CollectiveTimeout: a rank did not come.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}); got {rank}.")
    context = pygloo.rendezvous.Context(rank, size)
    device = pygloo.transport.tcp.CreateDevice(pygloo.transport.tcp.attr(host))
    store = _Addresses(exchange)
    group = PyglooGroup(context, rank, size, fence)
    group.guarded(context.connectFullMesh, pygloo.rendezvous.CustomStore(store), device)
    group.meet_generation()
    return group


class _Addresses:
    """What pygloo takes for a store. It writes the host's name under rank_N, then this rank's addresses under N."""

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
        # Names decide which of several devices is taken, and there is one.
        return self._host if key.startswith("rank_") else self._blobs[int(key)]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """What is asked for is there since `set`."""

    def delKeys(self, keys: Sequence[str]) -> None:
        """The exchange keeps nothing."""


class PyglooGroup(GatheringGroup):
    """One rank's `Group`."""

    timeout = TIMEOUT

    def __init__(self, context: Any, rank: int, size: int, fence: tuple[int, int]) -> None:
        self._context = context
        self.rank, self.size, self.members, self.fence = rank, size, range(size), fence
        self._failure: CollectiveError | None = None

    def meet_generation(self) -> None:
        """Find that all ranks are of this one."""
        self._meet(("fence", *self.fence), np.empty(0))

    def buffer(self, nbytes: int) -> Array:
        self._check()
        return np.zeros(nbytes, np.uint8)

    def subgroup(self, channel: int, ranks: Sequence[int] | None = None) -> PyglooGroup:
        raise ValueError("pygloo has no groups beside a group: connect another one, or use the engine's.")

    def limit(self, seconds: float | None) -> None:
        """Gloo's own stays."""

    def watch(self, called: Watch | None) -> None:
        """Nobody could be called while a call holds the interpreter's lock."""

    def abort(self, reason: str) -> None:
        self._fail(GroupAborted((self.rank,), reason))

    def close(self) -> None:
        self._fail(GroupAborted((self.rank,), f"rank {self.rank}: the group is closed"))

    def guarded(self, call: Any, *arguments: Any) -> None:
        """One call of pygloo's; an error ends the group and its connections: the others hear of it."""
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

    def _meet(self, call: tuple[Any, ...], part: Array) -> list[Array]:
        rows = part.shape[0] if part.ndim else 1
        heads = self._gathered(np.array([signature(*call), part.nbytes, rows], np.int64))
        for rank, (called, _, _) in enumerate(heads.tolist()):
            if called != heads[0, 0]:
                error = MismatchError(
                    (0, rank), f"rank {rank} called another collective than rank 0: {call} here"
                )
                self._fail(error)
                raise error
        sizes = heads[:, 1].tolist()
        padded = np.zeros(max(sizes), np.uint8)
        padded[: part.nbytes] = part.reshape(-1).view(np.uint8)
        found = self._gathered(padded) if max(sizes) else np.zeros((self.size, 0), np.uint8)
        shapes = [(count, *part.shape[1:]) if part.ndim else () for count in heads[:, 2].tolist()]
        return [
            found[rank, : sizes[rank]].copy().view(part.dtype).reshape(shapes[rank])
            for rank in range(self.size)
        ]

    def _gathered(self, array: Array) -> Array:
        """(size, *shape), of arrays of one shape."""
        found = np.empty((self.size, *array.shape), array.dtype)
        count, kind = array.size, DTYPES[array.dtype.name]
        self.guarded(pygloo.allgather, self._context, array.ctypes.data, found.ctypes.data, count, kind)
        return found

    def _folded(self, call: tuple[Any, ...], part: Array, dtype: str, reduction: Reduction) -> Array:
        # reducescatter is summed in rank order, and pygloo's ring is not.
        known = dtype in DTYPES and reduction.op in OPS
        if call[0] != "allreduce" or not known or not part.size:
            return super()._folded(call, part, dtype, reduction)
        self._meet(call, np.empty(0))  # so that ranks that disagree are told
        bcube = reduction.algorithm == "bcube" or (
            reduction.algorithm == "auto" and part.nbytes <= BCUBE_LIMIT
        )
        way = pygloo.allreduceAlgorithm.BCUBE if bcube else pygloo.allreduceAlgorithm.RING
        source, result = np.ascontiguousarray(part), np.empty_like(part)
        places = source.ctypes.data, result.ctypes.data, part.size
        self.guarded(pygloo.allreduce, self._context, *places, DTYPES[dtype], OPS[reduction.op], way)
        return scaled(result, reduction.after, self.size if reduction.op == "average" else 1)
