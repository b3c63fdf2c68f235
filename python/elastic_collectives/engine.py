"""The Python side of the native engine: one endpoint per process, one group of ranks per generation.

Arrays are anything that numpy can view without a copy. A group runs one collective at a time, from one thread; any
thread may call `abort` and `close`. After an error a group cannot be used again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from elastic_collectives import _engine
from elastic_collectives._engine import await_exit as await_exit
from elastic_collectives._engine import is_exiting as is_exiting
from elastic_collectives.errors import raise_by_cause, refuse_forks
from elastic_collectives.operands import (
    Array,
    Reduction,
    Shape,
    as_array,
    as_reduction,
    as_result,
    as_rows,
    divide_evenly,
    fuse_reductions,
    signature,
    split,
    validate_members,
    validate_root,
    validate_splits,
)

Exchange = Callable[[bytes], Sequence[bytes]]
"""Publishes this rank's blob and returns the blobs of all ranks, in rank order; may raise."""
FindAddresses = Callable[[Sequence[int]], Sequence[str]]
"""Returns the addresses of ranks that this one needs, or none at all if they cannot be known. Any thread."""
WaitObserver = Callable[[float, Sequence[int]], None]
"""Called with the seconds that this rank has been waiting and the ranks that it waits for."""

# Bytes of one part of a broadcast. Ranks forward a part while the next one arrives.
BROADCAST_PART = 1 << 26

MIN_TIMEOUT, MAX_TIMEOUT = 0.001, 1e9  # seconds

log = logging.getLogger("elastic_collectives")


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """Log each sentence once per process, although every generation may repeat it."""
    log.warning("%s", text)


_engine.set_error_raiser(raise_by_cause)
_engine.set_warning_handler(_warn_once)


class Endpoint(AbstractContextManager["Endpoint"]):
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

    def __exit__(self, *error: object) -> None:
        self.close()


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
    return Group(_GroupSpec(endpoint, peers, range(size), fence, timeout, local, find_addresses), rank)


@dataclass(frozen=True)
class _GroupSpec:
    """What a group and its subgroups are built from."""

    endpoint: Endpoint  # the process's listening socket
    peers: list[str]  # address of each rank's endpoint
    members: Sequence[int]  # each rank's number in the group that `connect` built
    fence: tuple[int, int]  # (attempt, generation)
    timeout: float  # seconds that one wait for a peer may last
    local: list[int]  # ranks on this rank's host; empty: sockets only
    # Of ranks whose address is empty among `peers`, by their numbers among `members`.
    find_addresses: FindAddresses | None
    channel: int = 0  # 0 for the group of all ranks, otherwise the subgroup's number

    def build_native(self, rank: int) -> _engine.Group:
        fence = (*self.fence, self.channel)
        find = None if self.find_addresses is None else self._find_addresses
        return _engine.Group(self.endpoint.native, rank, self.peers, fence, self.timeout, self.local, find)

    def _find_addresses(self, ranks: Sequence[int]) -> Sequence[str]:
        assert self.find_addresses is not None
        return self.find_addresses([self.members[rank] for rank in ranks])

    def restrict(self, ranks: Sequence[int], channel: int) -> _GroupSpec:
        local = [place for place, rank in enumerate(ranks) if rank in self.local]
        peers, members = [self.peers[rank] for rank in ranks], [self.members[rank] for rank in ranks]
        return replace(self, peers=peers, members=members, local=local, channel=channel)


class Group(AbstractContextManager["Group"]):
    """Collectives raise `CollectiveError`; every wait ends after the group's timeout. With a single rank every
    collective is the identity and uses no socket."""

    rank: int
    size: int
    members: Sequence[int]
    """Each rank's number in the group that `connect` built; differs from 0, 1, ... for a subgroup of some ranks."""
    fence: tuple[int, int]
    """(attempt, generation)."""
    timeout: float
    """Seconds that one wait for a peer may last, unless `set_timeout` changed it."""

    def __init__(self, spec: _GroupSpec, rank: int) -> None:
        self._spec = spec
        self._native = spec.build_native(rank)
        self._subgroups: list[Group] = []
        self._end_reason: str | None = None
        self._lock = threading.Lock()  # guards _subgroups and _end_reason
        self._pid = os.getpid()
        self.rank = rank
        self.size = len(spec.peers)
        self.members = spec.members
        self.fence = spec.fence
        self.timeout = spec.timeout

    def allreduce(
        self,
        array: Any,
        op: str = "sum",
        algorithm: str = "auto",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
    ) -> None:
        """Reduce `array` over all ranks, in place; identical bits everywhere.

        Args:
            array: C-contiguous and writable, of a dtype in operands.DTYPES; same dtype and shape on all ranks.
            op: sum, average, min, max, product or adasum. Integers wrap around and their average is truncated towards
                zero; for bool, sum and max mean "or", min and product mean "and"; 16-bit floats are accumulated as
                float32.
            algorithm: auto, ring (for large arrays) or bcube (for small ones).
            dtype: "bfloat16" if the array is uint16 that holds bfloat16.
            weight: of this rank's array in an average, such as its number of rows; an array of weight 0 is not read.
            scale: factors on the operand and on the result.
            compression: "fp16" or "bf16": float32 is sent in this format.
        """
        view = as_array(array, writable=True)
        self._allreduce(as_reduction(view, op, dtype, weight, scale, compression, algorithm))

    def bind_allreduce(self, array: Any, compression: str | None = None) -> Callable[[], None]:
        """A function that sums `array` as `allreduce` does, whose arguments are checked here, once for all calls."""
        view = as_array(array, writable=True)
        return partial(self._allreduce, as_reduction(view, "sum", None, None, (1.0, 1.0), compression))

    def grouped_allreduce(
        self,
        arrays: Sequence[Any],
        op: str = "sum",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
    ) -> None:
        """`allreduce` several arrays in place, with one exchange per dtype."""
        views = [as_array(array, writable=True) for array in arrays]
        whole = [as_reduction(view, op, dtype, weight, scale, compression) for view in views]
        for reduction in fuse_reductions(whole):
            self._allreduce(reduction)

    def reducescatter(
        self,
        array: Any,
        op: str = "sum",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
        out: Array | None = None,
    ) -> Array:
        """Return this rank's rows of the result of `allreduce`, summed in rank order; `array` is not changed.

        The first dimension is split evenly; if it does not divide, the first ranks get one row more. No adasum.

        Args:
            out: the array that receives the result, C-contiguous and of its shape and dtype; None: a new one.
        """
        refuse_forks(self._pid)
        view = as_rows(array)
        reduction = self._resolve_weight(as_reduction(view, op, dtype, weight, scale, compression))
        if op == "adasum":
            raise ValueError("reducescatter knows no adasum; use allreduce and take a part of its result.")
        if reduction.before != 1.0:
            view = np.zeros_like(view) if reduction.is_ignored else view.copy()
        counts = divide_evenly(len(view), self.size)
        part = as_result(out, (counts[self.rank], *view.shape[1:]), view.dtype)
        row = _row_size(view)
        native = [count * row for count in counts]
        self._native.reducescatter(_as_bytes(view), native, _as_bytes(part), _to_native(reduction))
        return part

    def broadcast(self, array: Any, root: int) -> None:
        """Copy `array` of rank `root` to all, in place; any dtype, with the same dtype and size on all ranks."""
        view = as_array(array, writable=self.rank != root)
        validate_root(root, self.size)
        if not self._is_single():
            data = _as_bytes(view if view.flags.writeable else view.copy())
            whole = data.nbytes if data.nbytes > BROADCAST_PART else 0
            same = signature(view.dtype.str, root, whole)
            for begin in range(0, max(data.nbytes, 1), BROADCAST_PART):
                self._native.broadcast(data[begin : begin + BROADCAST_PART], root, same)

    def alltoall(
        self,
        array: Any,
        splits: Sequence[int] | None = None,
        out: Array | None = None,
        incoming: Sequence[int] | None = None,
    ) -> tuple[Array, list[int]]:
        """Send rank r the r-th part of the first dimension; returns the parts received, in rank order, and their rows.

        Args:
            array: its dtype and all but the first dimension must be equal on all ranks.
            splits: rows for each rank; None: equal parts, and the first dimension must divide.
            incoming: rows from each rank, if all ranks know them, which saves a round trip. A rank that sends another
                number than its receiver expects is a mismatch.
            out: as in `reducescatter`.
        """
        view = as_rows(array)
        outgoing = validate_splits(len(view), splits, self.size)
        if self._is_single():
            received = as_result(out, view.shape, view.dtype)
            received[...] = view
            return received, list(outgoing)
        same = signature(view.dtype.str, view.shape[1:])
        counts = self._exchange_counts(outgoing, same) if incoming is None else list(incoming)
        received = as_result(out, (sum(counts), *view.shape[1:]), view.dtype)
        row = view.dtype.itemsize * _row_size(view)
        sent, came = _cut(view, outgoing, row), _cut(received, counts, row)
        self._native.alltoall(sent, came, same, incoming is None)
        return received, counts

    def alltoall_arrays(self, arrays: Sequence[Array], out: Sequence[Array]) -> None:
        """Send the r-th array to rank r, and receive into the r-th array of `out` what it sends.

        Where sender and receiver have arrays of another size it is a mismatch. All arrays have one dtype.
        """
        sent = [_as_bytes(as_array(array, writable=False)) for array in arrays]
        came = [_as_bytes(as_array(array, writable=True)) for array in out]
        if self._is_single():
            came[0][...] = sent[0]
        else:
            same = signature(*sorted({array.dtype.str for array in arrays}))
            self._native.alltoall(sent, came, same, False)

    def allgather(self, array: Any, out: Array | None = None) -> Array:
        """Return the arrays of all ranks (equal shape and dtype) as one array of shape (size, *array.shape).

        Args:
            out: as in `reducescatter`.
        """
        view = as_array(array, writable=False)
        gathered = as_result(out, (self.size, *view.shape), view.dtype)
        if self._is_single():
            gathered[0:1] = view
        else:
            same = signature(view.dtype.str, view.shape)
            self._native.allgather(_as_bytes(view), _as_bytes(gathered), [view.nbytes] * self.size, same)
        return gathered

    def allgatherv(self, array: Any) -> list[Array]:
        """Return the arrays of all ranks in rank order; the first dimension may differ between ranks."""
        view = as_rows(array)
        if self._is_single():
            return [view.copy()]
        same = signature(view.dtype.str, view.shape[1:])
        lengths = np.empty(self.size, np.int64)
        self._native.allgather(np.array([len(view)]), lengths, [8] * self.size, same)
        gathered = np.empty((int(lengths.sum()), *view.shape[1:]), view.dtype)
        row = view.dtype.itemsize * _row_size(view)
        if gathered.nbytes:
            sizes = [length * row for length in lengths.tolist()]
            self._native.allgather(_as_bytes(view), _as_bytes(gathered), sizes, same)
        return split(gathered, lengths.tolist())

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks in rank order; lengths may differ."""
        return [part.tobytes() for part in self.allgatherv(np.frombuffer(data, np.uint8))]

    def buffer(self, nbytes: int) -> Array:
        """Allocate zeroed memory for operands: large operands in it, on all ranks, are reduced without a copy.

        All ranks must call this in the same order as collectives. The memory lives as long as the array or a view of
        it, but belongs to this group: after a failure or `close`, copy what you need and use the next group's memory.
        """
        memory = self._native.memory(nbytes)
        return np.frombuffer(memoryview(memory), np.uint8)[:nbytes]

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        if not self._is_single():
            self._native.barrier()

    def set_timeout(self, seconds: float | None) -> None:
        """Set how long one wait for a peer may last; a wait under way counts as if it began now.

        With None a wait ends only by abort, by the death of a peer or with the group. Applies to this rank and this
        group only. Any thread.
        """
        if seconds is not None and not MIN_TIMEOUT <= seconds <= MAX_TIMEOUT:
            raise ValueError(
                f"a timeout must be seconds within {MIN_TIMEOUT} and {MAX_TIMEOUT:g}; got {seconds}."
            )
        self._native.set_timeout(seconds or 0.0)

    def watch(self, callback: WaitObserver | None) -> None:
        """Set a callback for collectives of this rank that wait longer than two seconds; called a few times a second.

        The waiting thread calls it; an exception from it ends the group. The ranks passed to it do not include ranks
        that wait themselves, and only one of several waiting ranks on a host is called. Any thread.
        """
        self._native.watch(callback)

    def subgroup(self, channel: int, ranks: Sequence[int] | None = None) -> Group:
        """Create another group of the same generation whose collectives are ordered independently.

        Nothing is exchanged before its first collective. The end of this group ends the subgroup, not vice versa. Any
        thread.

        Args:
            channel: identifies the subgroup, 1 or more; equal on all its ranks, used once per generation and rank.
            ranks: members among the ranks of this group, ascending; None: all.
        """
        members = validate_members(channel, ranks, self.rank, self.size)
        group = Group(self._spec.restrict(members, channel), members.index(self.rank))
        with self._lock:
            self._subgroups.append(group)
            ended = self._end_reason
        if ended is not None:
            group.abort(ended)
        return group

    def abort(self, reason: str) -> None:
        """Fail the group at once, here and at all reachable peers; any thread, any number of times."""
        if os.getpid() != self._pid:
            return  # the memory that this process shares with its parent is the parent's group's
        # Peers get it as UTF-8, which has no lone surrogates.
        reason = reason.encode("utf-8", "backslashreplace").decode()
        self._native.abort(reason)
        for group in self._end(reason):
            group.abort(reason)

    def _allreduce(self, reduction: Reduction) -> None:
        refuse_forks(self._pid)
        reduction = self._resolve_weight(reduction)
        if reduction.is_ignored:
            reduction.array.fill(0)
        self._native.allreduce(_as_bytes(reduction.array), _to_native(reduction))

    def _resolve_weight(self, reduction: Reduction) -> Reduction:
        """Gather the ranks' weights and turn a weighted average into a sum with a factor per rank."""
        if reduction.weight is None:
            return reduction
        weights = self.allgather(np.array([reduction.weight], np.float64))
        return reduction.with_weights(weights.ravel().tolist(), self.rank)

    def _exchange_counts(self, outgoing: Sequence[int], same: int) -> list[int]:
        """Tell each rank how many rows it will get; returns how many each rank will send."""
        incoming, ones = np.empty(self.size, np.int64), [1] * self.size
        sent = _cut(np.array(outgoing, np.int64), ones, 8)
        self._native.alltoall(sent, _cut(incoming, ones, 8), same, True)
        counts: list[int] = incoming.tolist()
        return counts

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        for group in self._end(f"rank {self.rank}: the group is closed"):
            group.close()
        self._native.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end(self, reason: str) -> list[Group]:
        with self._lock:
            self._end_reason = self._end_reason or reason
            return list(self._subgroups)

    def _is_single(self) -> bool:
        """Whether this rank is the only one. Raises if the group has failed."""
        refuse_forks(self._pid)
        self._native.check()
        return self.size == 1


def _row_size(view: Array) -> int:
    return int(np.prod(view.shape[1:], dtype=np.int64))


def _cut(view: Array, rows: Sequence[int], row: int) -> list[Array]:
    """Views of its bytes, with so many rows of `row` bytes in each."""
    data, begin, parts = _as_bytes(view), 0, []
    for count in rows:
        parts.append(data[begin : begin + count * row])
        begin += count * row
    return parts


def _as_bytes(view: Array) -> Array:
    """View an array as bytes: the native side must handle dtypes that numpy lacks, such as bfloat16."""
    return view.reshape(-1).view(np.uint8)


def _to_native(r: Reduction) -> _engine.Reduction:
    return _native_reduction(r.dtype, r.op, r.wire, r.algorithm, r.before, r.after, r.shapes)


@lru_cache(maxsize=1024)  # every step reduces the same shapes
def _native_reduction(
    dtype: str, op: str, wire: str, algorithm: str, before: float, after: float, shapes: tuple[Shape, ...]
) -> _engine.Reduction:
    kind, operator = getattr(_engine.DataType, dtype), getattr(_engine.ReduceOp, op)
    how = getattr(_engine.Wire, wire), getattr(_engine.Algorithm, algorithm)
    return _engine.Reduction(kind, operator, *how, before, after, signature(*shapes))
