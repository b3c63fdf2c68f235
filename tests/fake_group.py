"""Groups without sockets, for tests of code that uses `Group`: the ranks of one generation are threads of one process.

`FakeFabric(3).group(r)` behaves like a group of the engine: results, errors with ranks, abort, close, timeout,
mismatch. In addition a test can kill a rank. One difference: every collective waits for all ranks, including the root
of a broadcast. One condition variable guards all state; any thread may call anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic_collectives.engine import Group, WaitObserver
from elastic_collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    MismatchError,
    PeerLost,
)
from elastic_collectives.operands import (
    Array,
    Reduction,
    apply_scale,
    as_array,
    as_reduction,
    as_result,
    as_rows,
    divide_evenly,
    narrow,
    split,
    validate_members,
    validate_root,
    validate_splits,
    widen,
)
from tests.reductions import reduce_parts

TICK = 0.05  # seconds between two checks for missing ranks
WATCH_DELAY = 2.0  # seconds of waiting before the observer is called


@dataclass
class _Collective:
    """One collective: call and operand of each rank that has arrived."""

    calls: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    parts: dict[int, Array] = field(default_factory=dict)


class FakeFabric:
    """The shared state of one generation's groups. timeout: seconds that a collective waits for missing ranks."""

    def __init__(
        self,
        size: int,
        fence: tuple[int, int] = (1, 1),
        timeout: float = 10.0,
        members: Sequence[int] | None = None,  # of a subgroup, see `Group.members`
    ) -> None:
        self.size = size
        self.members = range(size) if members is None else members
        self.fence = fence
        self.timeout = timeout
        self._changed = threading.Condition()
        self._meetings: list[_Collective] = []
        self._failure: CollectiveError | None = None
        self._left: dict[int, CollectiveError] = {}  # closed or killed ranks, with what their own calls raise
        self._limits: dict[int, tuple[float | None, float]] = {}  # by rank: seconds, counted from a time
        self._watches: dict[int, WaitObserver | None] = {}
        self._subgroups: dict[int, tuple[list[int], FakeFabric]] = {}
        self._groups = [FakeGroup(self, rank) for rank in range(size)]

    @property
    def groups(self) -> Sequence[FakeGroup]:
        return self._groups

    def group(self, rank: int) -> FakeGroup:
        return self._groups[rank]

    def kill(self, rank: int) -> None:
        """Kill the rank: its own calls raise, and peers that wait for it get `PeerLost`."""
        self.leave(rank, GroupAborted((rank,), f"rank {rank} was killed by the test"))

    def fail(self, error: CollectiveError) -> None:
        """End the group; the first cause stays."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
            beside = list(self._subgroups.values())
        for members, fabric in beside:
            fabric.fail(_translate_ranks(members, error))

    def leave(self, rank: int, own: CollectiveError) -> None:
        """Remove the rank; its own calls raise `own` from now on."""
        with self._changed:
            self._left.setdefault(rank, own)
            self._changed.notify_all()
            beside = list(self._subgroups.values())
        for members, fabric in beside:
            if rank in members:
                fabric.leave(members.index(rank), _translate_ranks(members, own))

    def subgroup_fabric(self, channel: int, members: list[int]) -> FakeFabric:
        """Return the fabric of a subgroup; the first rank that asks creates it."""
        with self._changed:
            known = self._subgroups.get(channel)
            if known is None:
                among = [self.members[rank] for rank in members]
                fabric = FakeFabric(len(members), self.fence, self.timeout, among)
                self._subgroups[channel] = members, fabric
                fabric._failure = self._failure and _translate_ranks(members, self._failure)
                for rank, why in self._left.items():
                    if rank in members:
                        fabric._left[members.index(rank)] = _translate_ranks(members, why)
                return fabric
        if known[0] != members:
            raise ValueError(f"channel {channel} is one of ranks {known[0]}, and not of {members}.")
        return known[1]

    def exchange_parts(self, rank: int, nth: int, call: tuple[Any, ...], part: Array) -> list[Array]:
        """Pass `part` to the rank's n-th collective and return all parts in rank order."""
        with self._changed:
            self._check(rank)
            while len(self._meetings) < nth:
                self._meetings.append(_Collective())
            meeting = self._meetings[nth - 1]
            meeting.calls[rank], meeting.parts[rank] = call, part.copy()
            self._changed.notify_all()
            self._wait(rank, meeting)
            if len(meeting.parts) < self.size:
                self._check(rank)
            return self._result(meeting)

    def set_timeout(self, rank: int, seconds: float | None) -> None:
        with self._changed:
            self._limits[rank] = seconds, time.monotonic()

    def watch(self, rank: int, callback: WaitObserver | None) -> None:
        with self._changed:
            self._watches[rank] = callback

    def _wait(self, rank: int, meeting: _Collective) -> None:
        begin = time.monotonic()
        while not self._changed.wait_for(lambda: self._is_over(rank, meeting), TICK):
            now, missing = time.monotonic(), self._missing(meeting)
            watch = self._watches.get(rank)
            if watch is not None and now - begin >= WATCH_DELAY and rank == min(meeting.parts):
                watch(now - begin, missing)
            limit, since = self._limits.get(rank, (self.timeout, begin))
            if limit is not None and now - max(begin, since) >= limit:
                reason = f"rank {rank}: timed out after {limit} s, waiting for rank(s) {missing}"
                self.fail(CollectiveTimeout(missing, reason))

    def _missing(self, meeting: _Collective) -> list[int]:
        return [rank for rank in range(self.size) if rank not in meeting.parts]

    def _is_over(self, rank: int, meeting: _Collective) -> bool:
        missing = self._missing(meeting)
        lost = [peer for peer in missing if peer in self._left]
        if lost:
            self.fail(PeerLost(lost[:1], f"rank {rank}: connection to rank {lost[0]}: closed by peer"))
        return not missing or self._failure is not None or rank in self._left

    def check(self, rank: int) -> None:
        """Raise the error that ended the rank or the group, if any."""
        with self._changed:
            self._check(rank)

    def _check(self, rank: int) -> None:
        error = self._left.get(rank) or self._failure
        if error is not None:
            raise type(error)(error.ranks, error.reason)

    def _result(self, meeting: _Collective) -> list[Array]:
        first, *others = (meeting.calls[rank] for rank in range(self.size))
        for other, call in enumerate(others, 1):
            if call != first:
                reason = f"rank 0 called {first} where rank {other} called {call}"
                self.fail(MismatchError((0, other), reason))
                raise MismatchError((0, other), reason)
        return [meeting.parts[rank] for rank in range(self.size)]


class FakeGroup(Group):
    """One rank's `Group`: all collectives are built on one, in which each passes an array and gets those of all."""

    def __init__(self, fabric: FakeFabric, rank: int) -> None:
        self._fabric = fabric
        self._calls = 0
        self.rank = rank
        self.size = fabric.size
        self.members = fabric.members
        self.fence = fabric.fence
        self.timeout = fabric.timeout

    def buffer(self, nbytes: int) -> Array:
        self._fabric.check(self.rank)
        return np.zeros(nbytes, np.uint8)

    def subgroup(self, channel: int, ranks: Sequence[int] | None = None) -> FakeGroup:
        members = validate_members(channel, ranks, self.rank, self.size)
        return self._fabric.subgroup_fabric(channel, members).group(members.index(self.rank))

    def set_timeout(self, seconds: float | None) -> None:
        self._fabric.set_timeout(self.rank, seconds)

    def watch(self, callback: WaitObserver | None) -> None:
        self._fabric.watch(self.rank, callback)

    def abort(self, reason: str) -> None:
        self._fabric.fail(GroupAborted((), reason))

    def close(self) -> None:
        self._fabric.leave(self.rank, GroupAborted((), f"rank {self.rank}: the group is closed"))

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
        view = as_rows(array)
        reduction = as_reduction(view, op, dtype, weight, scale, compression)
        if op == "adasum":
            raise ValueError("reducescatter knows no adasum; use allreduce and take a part of its result.")
        parts = split(self._reduce("reducescatter", reduction), divide_evenly(len(view), self.size))
        return _place(parts[self.rank], out)

    def broadcast(self, array: Any, root: int) -> None:
        view = as_array(array, writable=self.rank != root)
        validate_root(root, self.size)
        parts = self._exchange_parts(("broadcast", view.nbytes, view.dtype.str, root), view)
        if self.rank != root:
            view.reshape(-1).view(np.uint8)[:] = parts[root].reshape(-1).view(np.uint8)

    def allgather(self, array: Any, out: Array | None = None) -> Array:
        view = as_array(array, writable=False)
        return _place(np.stack(self._exchange_parts(("allgather", view.shape, view.dtype.str), view)), out)

    def allgatherv(self, array: Any) -> list[Array]:
        view = as_rows(array)
        parts = self._exchange_parts(("allgatherv", view.shape[1:], view.dtype.str), view)
        return [part.copy() for part in parts]

    def alltoall(
        self,
        array: Any,
        splits: Sequence[int] | None = None,
        out: Array | None = None,
        incoming: Sequence[int] | None = None,
    ) -> tuple[Array, list[int]]:
        view = as_rows(array)
        outgoing = validate_splits(len(view), splits, self.size)
        told = np.array([outgoing, incoming or [-1] * self.size])
        both = np.stack(self._exchange_parts(("splits", view.shape[1:], view.dtype.str), told))
        lengths, expected = both[:, 0], both[:, 1]
        for receiver, sender in np.argwhere((expected >= 0) & (expected != lengths.T)).tolist():
            what = f"{lengths[sender, receiver]} rows to rank {receiver}"
            reason = f"rank {sender} sends {what}, which expects {expected[receiver, sender]}"
            self.abort(reason)
            raise MismatchError((receiver, sender), reason)
        counts: list[int] = lengths[:, self.rank].tolist()
        parts = self._exchange_parts(("alltoall", view.shape[1:], view.dtype.str), view)
        mine = [split(part, length)[self.rank] for part, length in zip(parts, lengths.tolist(), strict=True)]
        return _place(np.concatenate(mine), out), counts

    def alltoall_arrays(self, arrays: Sequence[Array], out: Sequence[Array]) -> None:
        lengths = [array.size for array in out]
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        received, _ = self.alltoall(flat, [array.size for array in arrays], incoming=lengths)
        for target, part in zip(out, split(received, lengths), strict=True):
            target[...] = part.reshape(target.shape)

    def barrier(self) -> None:
        self._exchange_parts(("barrier",), np.empty(0))

    def _allreduce(self, reduction: Reduction) -> None:
        reduction.array[...] = self._reduce("allreduce", reduction)

    def _reduce(self, kind: str, reduction: Reduction) -> Array:
        reduction = self._resolve_weight(reduction)
        view, dtype = reduction.array, reduction.dtype
        own = np.zeros_like(view) if reduction.is_ignored else view
        own = narrow(apply_scale(widen(own, dtype), reduction.before), dtype)
        # The name tells 16-bit floats apart: numpy holds bfloat16 as uint16.
        wire = dtype if reduction.wire == "plain" else reduction.wire
        call = (kind, reduction.shapes, dtype, reduction.op, wire, reduction.algorithm)
        result = self._fold_parts(call, own if wire == dtype else narrow(own, wire), wire, reduction)
        return result if wire == dtype else widen(result, wire)

    def _fold_parts(self, call: tuple[Any, ...], part: Array, dtype: str, reduction: Reduction) -> Array:
        """Reduce the parts of all ranks, which have this dtype, to one array."""
        return reduce_parts(self._exchange_parts(call, part), dtype, reduction.op, reduction.after)

    def _exchange_parts(self, call: tuple[Any, ...], part: Array) -> list[Array]:
        """call: must be equal on all ranks. part: may differ between ranks in its first dimension."""
        self._calls += 1
        return self._fabric.exchange_parts(self.rank, self._calls, call, part)


def _translate_ranks(members: Sequence[int], error: CollectiveError) -> CollectiveError:
    """Translate the whole group's error to the rank numbers of a subgroup; ranks outside of it are dropped."""
    return type(error)([members.index(rank) for rank in error.ranks if rank in members], error.reason)


def _place(result: Array, out: Array | None) -> Array:
    """The result itself, or `out` with its values."""
    if out is None:
        return result
    target = as_result(out, result.shape, result.dtype)
    target[...] = result
    return target
