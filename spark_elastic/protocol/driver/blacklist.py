"""Slots and hosts that are not used for a while after failures: strikes, and cooldowns that grow with them.

Values and arithmetic only; the machine says what is a strike. A worker on a blacklisted host that is a member of a
world stays in it: what works is not taken apart, the host only gets nothing new.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from spark_elastic.protocol.table import Table
from spark_elastic.protocol.types import HostId, Limits, SlotId

JITTER = 0.25  # of a delay, so that hosts that failed together do not come back together
MOST_DOUBLINGS = 60


@dataclass(frozen=True)
class Standing:
    """strikes: failures that are not forgiven yet. last: when the newest happened. until: not used before that time.
    proven: a worker of it took part in a world since then."""

    strikes: int
    last: float
    until: float
    proven: bool = False


Standings: TypeAlias = Table[str, Standing]


def delay(name: str, strikes: int, lower: float, upper: float) -> float:
    """Seconds of cooldown after so many strikes: `lower`, then twice as long each time with up to `JITTER` more, at
    most `upper`. The jitter is a hash of name and count, so that a replay gives the same."""
    doubled = lower * 2.0 ** min(strikes - 1, MOST_DOUBLINGS)
    share = zlib.crc32(f"{name}:{strikes}".encode()) / 2**32 if strikes > 1 else 0.0
    return min(upper, doubled * (1.0 + JITTER * share))


@dataclass(frozen=True)
class Blacklist:
    """failed: by host, which of its slots failed and when (the newest of each)."""

    slots: Standings = field(default_factory=Table)
    hosts: Standings = field(default_factory=Table)
    failed: Table[HostId, tuple[tuple[SlotId, float], ...]] = field(default_factory=Table)

    def __bool__(self) -> bool:
        return bool(self.slots) or bool(self.hosts)

    def strike(self, slot: SlotId, host: HostId, room: int, now: float, limits: Limits) -> Blacklist:
        """A worker of `slot` failed. room: how many slots the host has.

        The slot cools down. The host does so as a whole once more than one of its slots failed within
        `failure_window`, or its only one.
        """
        oldest = now - limits.failure_window
        earlier = tuple(f for f in self.failed.get(host, ()) if f[0] != slot and f[1] >= oldest)
        failed = (*earlier, (slot, now))
        struck = replace(
            self,
            slots=self.slots.put(slot, _struck(slot, self.slots.get(slot), now, limits)),
            failed=self.failed.put(host, failed),
        )
        if len(failed) > 1 or room <= 1:
            return replace(
                struck, hosts=self.hosts.put(host, _struck(host, self.hosts.get(host), now, limits))
            )
        return struck

    def praise(self, slot: SlotId, host: HostId) -> Blacklist:
        """A worker of the slot takes part in a world, which proves slot and host."""
        return replace(self, slots=_proven(self.slots, slot), hosts=_proven(self.hosts, host))

    def forget(self, slot: SlotId) -> Blacklist:
        """The slot is gone and its name is never used again; its host keeps what it did."""
        return replace(self, slots=self.slots.drop(slot)) if slot in self.slots else self

    def forget_host(self, host: HostId) -> Blacklist:
        """The host is gone and its name is never used again."""
        if host not in self.failed:
            return self
        return replace(self, hosts=self.hosts.drop(host), failed=self.failed.drop(host))

    def host_until(self, host: HostId, now: float) -> float | None:
        """When the host may be used again; None: now."""
        return _until(self.hosts.get(host), now)

    def slot_until(self, slot: SlotId, host: HostId, now: float) -> float | None:
        """When a worker of that slot may come into a world; None: now."""
        times = [_until(self.slots.get(slot), now), self.host_until(host, now)]
        return max((time for time in times if time is not None), default=None)


def _until(standing: Standing | None, now: float) -> float | None:
    return standing.until if standing is not None and now < standing.until else None


def _struck(name: str, before: Standing | None, now: float, limits: Limits) -> Standing:
    forgiven = before is None or (
        before.proven and now - max(before.last, before.until) > limits.failure_window
    )
    strikes = 1 if before is None or forgiven else before.strikes + 1
    lower, upper = limits.cooldown_range
    return Standing(strikes, now, now + delay(name, strikes, lower, upper))


def _proven(standings: Standings, name: str) -> Standings:
    standing = standings.get(name)
    return (
        standings
        if standing is None or standing.proven
        else standings.put(name, replace(standing, proven=True))
    )
