"""The native engine's face: an endpoint per process, a group per generation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from elastic_collectives import _engine
from elastic_collectives.closing import Closing
from elastic_collectives.errors import raise_by_cause
from elastic_collectives.group import Array, Group, Watch
from elastic_collectives.operands import (
    Reduction,
    as_array,
    as_reduction,
    as_rows,
    checked_members,
    checked_root,
    checked_splits,
    even_parts,
    signature,
    split,
)
from elastic_collectives.reducing import ReducingGroup

Exchange = Callable[[bytes], Sequence[bytes]]
"""Hands in one's own blob and returns everybody's, in rank order; may raise."""

# Bytes up to which allreduce over sockets takes bcube, above it the ring, until the ranks have tried both and agree on
# one (csrc/calls/crossover). On one machine the ring won from 0.5 MB on with two ranks and from 4 MB on with four,
# mostly by a quarter or less.
BCUBE_LIMIT = 1 << 20

# Bytes that are broadcast at once: ranks pass a part on while the next one comes, and no wait is for more than one,
# however large a state is and slow a network.
BROADCAST_PART = 1 << 26

SHORTEST, LONGEST = 0.001, 1e9  # seconds that a wait may be given

log = logging.getLogger("elastic_collectives")


@lru_cache(maxsize=64)
def _tell(text: str, warns: bool) -> None:
    """Each sentence once in a process, however many generations come to it."""
    log.log(logging.WARNING if warns else logging.INFO, "%s", text)


_engine.set_raiser(raise_by_cause)
_engine.set_teller(_tell)


class Endpoint(Closing):
    """The one listening socket of a process, for all its groups.

    key: the job's secret; only its holders may connect. host: what to bind. port_range: ports to choose from, both
    ends included; None: any. advertise: the host name or address that peers dial, default `host`. encrypted: what goes
    to peers goes inside TLS 1.3, by the key; all ranks alike. It takes the system's OpenSSL.

    Raises:
        ValueError: an argument makes no sense. RuntimeError: nothing of `port_range` is free on `host`, or there is no
            OpenSSL to encrypt with.
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
            raise ValueError("key must not be empty: it is what keeps strangers out.")
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


def connect(
    endpoint: Endpoint,
    rank: int,
    size: int,
    fence: tuple[int, int],
    exchange: Exchange,
    timeout: float = 60.0,
    local_ranks: Sequence[int] | None = None,
) -> Group:
    """Build the group of one generation.

    fence: (attempt, generation); peers of an older one are turned away, of a newer one kept waiting.
    exchange: called once with this rank's blob. timeout: seconds that one wait for a peer may last (two
    more where all of them are alive and wait in their turn), 0.001 or more.
    local_ranks: the ranks on this rank's host, itself among them; they exchange through shared memory, if all of them
    turn out to share it. None, for all ranks or for none: everything goes through sockets.

    Raises:
        ValueError: rank, size, local_ranks, timeout or the number of blobs make no sense.
        RuntimeError: the endpoint is closed. Whatever `exchange` raises.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}); got {rank}.")
    if not SHORTEST <= timeout <= LONGEST:
        raise ValueError(f"timeout must be seconds within {SHORTEST} and {LONGEST:g}; got {timeout}.")
    local = sorted(local_ranks or ())
    if local and (rank not in local or len(set(local)) < len(local) or not 0 <= local[0] <= local[-1] < size):
        raise ValueError(f"local_ranks must be ranks in [0, {size}), {rank} among them; got {local_ranks}.")
    blobs = exchange(endpoint.address.encode())
    if len(blobs) != size:
        raise ValueError(f"the exchange returned {len(blobs)} blobs for {size} ranks.")
    peers = [blob.decode() for blob in blobs]
    return EngineGroup(_Origin(endpoint, peers, range(size), fence, timeout, local), rank)


@dataclass(frozen=True)
class _Origin:
    """What a group was made of, and its subgroups are."""

    endpoint: Endpoint
    peers: list[str]
    members: Sequence[int]
    fence: tuple[int, int]
    timeout: float
    local: list[int]
    channel: int = 0

    def native(self, rank: int) -> _engine.Group:
        fence = (*self.fence, self.channel)
        return _engine.Group(
            self.endpoint.native, rank, self.peers, fence, self.timeout, BCUBE_LIMIT, self.local
        )

    def among(self, ranks: Sequence[int], channel: int) -> _Origin:
        local = [place for place, rank in enumerate(ranks) if rank in self.local]
        peers, members = [self.peers[rank] for rank in ranks], [self.members[rank] for rank in ranks]
        return replace(self, peers=peers, members=members, local=local, channel=channel)


class EngineGroup(ReducingGroup):
    """`Group` over the native engine. A lone rank needs no sockets: its collectives are the identity."""

    def __init__(self, origin: _Origin, rank: int) -> None:
        self._origin = origin
        self._native = origin.native(rank)
        self._subgroups: list[EngineGroup] = []
        self._ended: str | None = None
        self._lock = threading.Lock()  # owns the two
        self.rank = rank
        self.size = len(origin.peers)
        self.members = origin.members
        self.fence = origin.fence
        self.timeout = origin.timeout

    def reducescatter(
        self,
        array: Any,
        op: str = "sum",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
    ) -> Array:
        view = as_rows(array)
        reduction = self._by_weight(as_reduction(view, op, dtype, weight, scale, compression))
        if op == "adasum":
            raise ValueError("reducescatter knows no adasum; use allreduce and take a part of its result.")
        if reduction.before != 1.0:
            view = np.zeros_like(view) if reduction.silent else view.copy()
        counts = even_parts(len(view), self.size)
        part = np.empty((counts[self.rank], *view.shape[1:]), view.dtype)
        row = _elements_of_a_row(view)
        native = [count * row for count in counts]
        self._native.reducescatter(_memory(view), native, _memory(part), _native_form(reduction))
        return part

    def broadcast(self, array: Any, root: int) -> None:
        view = as_array(array, writable=self.rank != root)
        checked_root(root, self.size)
        if not self._alone():
            data = _memory(view if view.flags.writeable else view.copy())
            whole = data.nbytes if data.nbytes > BROADCAST_PART else 0
            same = signature(view.dtype.str, root, whole)
            for begin in range(0, max(data.nbytes, 1), BROADCAST_PART):
                self._native.broadcast(data[begin : begin + BROADCAST_PART], root, same)

    def allgather(self, array: Any) -> Array:
        view = as_array(array, writable=False)
        gathered = np.empty((self.size, *view.shape), view.dtype)
        if self._alone():
            gathered[0:1] = view
        else:
            same = signature(view.dtype.str, view.shape)
            self._native.allgather(_memory(view), _memory(gathered), [view.nbytes] * self.size, same)
        return gathered

    def allgatherv(self, array: Any) -> list[Array]:
        view = as_rows(array)
        if self._alone():
            return [view.copy()]
        same = signature(view.dtype.str, view.shape[1:])
        lengths = np.empty(self.size, np.int64)
        self._native.allgather(np.array([len(view)]), lengths, [8] * self.size, same)
        gathered = np.empty((int(lengths.sum()), *view.shape[1:]), view.dtype)
        row = view.dtype.itemsize * _elements_of_a_row(view)
        if gathered.nbytes:
            sizes = [length * row for length in lengths.tolist()]
            self._native.allgather(_memory(view), _memory(gathered), sizes, same)
        return split(gathered, lengths.tolist())

    def alltoall(self, array: Any, splits: Sequence[int] | None = None) -> tuple[Array, list[int]]:
        view = as_rows(array)
        outgoing = np.array(checked_splits(len(view), splits, self.size), np.int64)
        if self._alone():
            return view.copy(), outgoing.tolist()
        same = signature(view.dtype.str, view.shape[1:])
        incoming, each = np.empty_like(outgoing), [8] * self.size
        self._native.alltoall(outgoing, each, incoming, each, same)
        received = np.empty((int(incoming.sum()), *view.shape[1:]), view.dtype)
        row = view.dtype.itemsize * _elements_of_a_row(view)
        sent, came = (outgoing * row).tolist(), (incoming * row).tolist()
        self._native.alltoall(_memory(view), sent, _memory(received), came, same)
        return received, incoming.tolist()

    def buffer(self, nbytes: int) -> Array:
        memory = self._native.memory(nbytes)
        return np.frombuffer(memoryview(memory), np.uint8)[:nbytes]

    def barrier(self) -> None:
        if not self._alone():
            self._native.barrier()

    def subgroup(self, channel: int, ranks: Sequence[int] | None = None) -> EngineGroup:
        members = checked_members(channel, ranks, self.rank, self.size)
        group = EngineGroup(self._origin.among(members, channel), members.index(self.rank))
        with self._lock:
            self._subgroups.append(group)
            ended = self._ended
        if ended is not None:
            group.abort(ended)
        return group

    def abort(self, reason: str) -> None:
        self._native.abort(reason)
        for group in self._end(reason):
            group.abort(reason)

    def close(self) -> None:
        for group in self._end(f"rank {self.rank}: the group is closed"):
            group.close()
        self._native.close()

    def limit(self, seconds: float | None) -> None:
        if seconds is not None and not SHORTEST <= seconds <= LONGEST:
            raise ValueError(f"a limit must be seconds within {SHORTEST} and {LONGEST:g}; got {seconds}.")
        self._native.limit(seconds or 0.0)

    def watch(self, called: Watch | None) -> None:
        self._native.watch(called)

    def _end(self, reason: str) -> list[EngineGroup]:
        with self._lock:
            self._ended = self._ended or reason
            return list(self._subgroups)

    def _allreduce(self, reduction: Reduction) -> None:
        reduction = self._by_weight(reduction)
        if reduction.silent:
            reduction.array.fill(0)
        self._native.allreduce(_memory(reduction.array), _native_form(reduction))

    def _alone(self) -> bool:
        """Whether there is nobody to exchange with; a failed group fails even then."""
        self._native.check()
        return self.size == 1


def _elements_of_a_row(view: Array) -> int:
    return int(np.prod(view.shape[1:], dtype=np.int64))


def _memory(view: Array) -> Array:
    """Bytes to the native side, which need not know of dtypes that numpy itself does not know."""
    return view.reshape(-1).view(np.uint8)


def _native_form(reduction: Reduction) -> _engine.Reduction:
    return _native_reduction(
        reduction.dtype,
        reduction.op,
        reduction.wire,
        reduction.algorithm,
        reduction.before,
        reduction.after,
        reduction.shapes,
    )


@lru_cache(maxsize=1024)  # each step reduces the same
def _native_reduction(
    dtype: str,
    op: str,
    wire: str,
    algorithm: str,
    before: float,
    after: float,
    shapes: tuple[tuple[int, ...], ...],
) -> _engine.Reduction:
    return _engine.Reduction(
        type=getattr(_engine.DataType, dtype),
        op=getattr(_engine.ReduceOp, op),
        wire=getattr(_engine.Wire, wire),
        algorithm=getattr(_engine.Algorithm, algorithm),
        before=before,
        after=after,
        shape=signature(*shapes),
    )
