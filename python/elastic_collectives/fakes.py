"""Groups without sockets: the ranks of one generation as threads of one process, for tests of what stands on `Group`.

`FakeFabric(3).group(r)` behaves as a group of the engine does: results, errors with ranks, abort, close, timeout,
mismatch. Beyond that a test may end a rank, at once or at its n-th collective. One thing is stricter: every
collective waits for all ranks, a broadcast's root included.
One condition guards everything; any thread may call anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic_collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    MismatchError,
    PeerLost,
)
from elastic_collectives.gathering import GatheringGroup
from elastic_collectives.group import Array, Watch
from elastic_collectives.operands import checked_members

TICK = 0.05  # seconds between two looks at who is missing
WATCHED_FROM = 2.0  # seconds


@dataclass
class _Meeting:
    """One collective: what each rank that has come called, and brought."""

    calls: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    parts: dict[int, Array] = field(default_factory=dict)


class FakeFabric:
    """What the groups of one generation share. timeout: seconds that a collective waits for the missing ranks.
    members: as `Group`'s; None: it is of no subgroup."""

    def __init__(
        self,
        size: int,
        fence: tuple[int, int] = (1, 1),
        timeout: float = 10.0,
        members: Sequence[int] | None = None,
    ) -> None:
        self.size = size
        self.members = range(size) if members is None else members
        self.fence = fence
        self.timeout = timeout
        self._news = threading.Condition()
        self._meetings: list[_Meeting] = []
        self._failure: CollectiveError | None = None
        self._gone: dict[int, CollectiveError] = {}  # closed or killed ranks; what their own calls raise
        self._limits: dict[int, tuple[float | None, float]] = {}  # by rank: seconds, and from when they count
        self._watches: dict[int, Watch | None] = {}
        self._planned: dict[tuple[int, int], Callable[[], None]] = {}
        self._beside: dict[int, tuple[list[int], FakeFabric]] = {}
        self._groups = [FakeGroup(self, rank) for rank in range(size)]

    @property
    def groups(self) -> Sequence[FakeGroup]:
        return self._groups

    def group(self, rank: int) -> FakeGroup:
        return self._groups[rank]

    def kill(self, rank: int) -> None:
        """The rank is gone without a word: its own calls raise, peers that need it get `PeerLost`."""
        self.leave(rank, GroupAborted((rank,), f"rank {rank} was killed by the test"))

    def kill_at(self, rank: int, nth: int) -> None:
        """Kill the rank as it enters its n-th collective, counted from 1."""
        self._planned[rank, nth] = lambda: self.kill(rank)

    def fail_at(self, rank: int, nth: int, error: CollectiveError) -> None:
        """Let the rank's n-th collective, counted from 1, end the group with `error` on all ranks."""
        self._planned[rank, nth] = lambda: self.fail(error)

    def fail(self, error: CollectiveError) -> None:
        """End the group; the first cause stays."""
        with self._news:
            self._failure = self._failure or error
            self._news.notify_all()
            beside = list(self._beside.values())
        for members, fabric in beside:
            fabric.fail(_within(members, error))

    def leave(self, rank: int, own: CollectiveError) -> None:
        """The rank takes part no more; `own` is what its calls raise from now on."""
        with self._news:
            self._gone.setdefault(rank, own)
            self._news.notify_all()
            beside = list(self._beside.values())
        for members, fabric in beside:
            if rank in members:
                fabric.leave(members.index(rank), _within(members, own))

    def beside(self, channel: int, members: list[int]) -> FakeFabric:
        """The fabric of a subgroup; made by the first of its ranks that asks."""
        with self._news:
            known = self._beside.get(channel)
            if known is None:
                among = [self.members[rank] for rank in members]
                fabric = FakeFabric(len(members), self.fence, self.timeout, among)
                self._beside[channel] = members, fabric
                fabric._failure = self._failure and _within(members, self._failure)
                fabric._gone = {
                    members.index(r): _within(members, why) for r, why in self._gone.items() if r in members
                }
                return fabric
        if known[0] != members:
            raise ValueError(f"channel {channel} is one of ranks {known[0]}, and not of {members}.")
        return known[1]

    def meet(self, rank: int, nth: int, call: tuple[Any, ...], part: Array) -> list[Array]:
        """Bring `part` to the rank's n-th collective and return all parts in rank order."""
        if planned := self._planned.pop((rank, nth), None):
            planned()
        with self._news:
            self._check(rank)
            while len(self._meetings) < nth:
                self._meetings.append(_Meeting())
            meeting = self._meetings[nth - 1]
            meeting.calls[rank], meeting.parts[rank] = call, part.copy()
            self._news.notify_all()
            self._await(rank, meeting)
            if len(meeting.parts) < self.size:
                self._check(rank)
            return self._result(meeting)

    def limit(self, rank: int, seconds: float | None) -> None:
        with self._news:
            self._limits[rank] = seconds, time.monotonic()

    def watch(self, rank: int, called: Watch | None) -> None:
        with self._news:
            self._watches[rank] = called

    def _await(self, rank: int, meeting: _Meeting) -> None:
        begin = time.monotonic()
        while not self._news.wait_for(lambda: self._settled(rank, meeting), TICK):
            now, missing = time.monotonic(), self._missing(meeting)
            watch = self._watches.get(rank)
            if watch is not None and now - begin >= WATCHED_FROM and rank == min(meeting.parts):
                watch(now - begin, missing)
            limit, since = self._limits.get(rank, (self.timeout, begin))
            if limit is not None and now - max(begin, since) >= limit:
                reason = f"rank {rank}: timed out after {limit} s, waiting for rank(s) {missing}"
                self.fail(CollectiveTimeout(missing, reason))

    def _missing(self, meeting: _Meeting) -> list[int]:
        return [rank for rank in range(self.size) if rank not in meeting.parts]

    def _settled(self, rank: int, meeting: _Meeting) -> bool:
        missing = self._missing(meeting)
        lost = [peer for peer in missing if peer in self._gone]
        if lost:
            self.fail(PeerLost(lost[:1], f"rank {rank}: connection to rank {lost[0]}: closed by peer"))
        return not missing or self._failure is not None or rank in self._gone

    def check(self, rank: int) -> None:
        """Raise what has ended the rank or the group."""
        with self._news:
            self._check(rank)

    def _check(self, rank: int) -> None:
        error = self._gone.get(rank) or self._failure
        if error is not None:
            raise type(error)(error.ranks, error.reason)

    def _result(self, meeting: _Meeting) -> list[Array]:
        first, *others = (meeting.calls[rank] for rank in range(self.size))
        for other, call in enumerate(others, 1):
            if call != first:
                reason = f"rank 0 called {first} where rank {other} called {call}"
                self.fail(MismatchError((0, other), reason))
                raise MismatchError((0, other), reason)
        return [meeting.parts[rank] for rank in range(self.size)]


class FakeGroup(GatheringGroup):
    """One rank's `Group`."""

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
        members = checked_members(channel, ranks, self.rank, self.size)
        return self._fabric.beside(channel, members).group(members.index(self.rank))

    def limit(self, seconds: float | None) -> None:
        self._fabric.limit(self.rank, seconds)

    def watch(self, called: Watch | None) -> None:
        self._fabric.watch(self.rank, called)

    def abort(self, reason: str) -> None:
        self._fabric.fail(GroupAborted((), reason))

    def close(self) -> None:
        self._fabric.leave(self.rank, GroupAborted((), f"rank {self.rank}: the group is closed"))

    def _meet(self, call: tuple[Any, ...], part: Array) -> list[Array]:
        self._calls += 1
        return self._fabric.meet(self.rank, self._calls, call, part)


def _within(members: Sequence[int], error: CollectiveError) -> CollectiveError:
    """The whole group's error as a subgroup of these ranks raises it: in its own numbers, of those it has."""
    return type(error)([members.index(rank) for rank in error.ranks if rank in members], error.reason)
