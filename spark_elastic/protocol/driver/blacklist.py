"""Slots and hosts that are not used for a while after failures, and machines that cannot reach each other, which are
not in one world for a while: cooldowns that grow with each failure.

Values and arithmetic only; the machine says what counts as a failure. A worker on a blacklisted host that is a member
of a world stays in it: a host that works is not disturbed, it only gets no new workers.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from spark_elastic.protocol.types import HostId, Limits, SlotId, Table

JITTER = 0.25  # share of a delay, so that hosts that failed together do not come back together
MAX_DOUBLINGS = 60
LONGEST_LINK_COOLDOWN = 3600.0  # seconds; each new try costs the job a `collective_timeout`


@dataclass(frozen=True)
class Cooldown:
    """The failures of a slot or host."""

    failures: int  # failures that are not forgiven yet
    last: float  # when the newest happened
    until: float  # not used before that time
    proven: bool = False  # a worker of it took part in a world since then


Cooldowns: TypeAlias = Table[str, Cooldown]


def compute_cooldown(name: str, failures: int, lower: float, upper: float) -> float:
    """Seconds of cooldown after so many failures: `lower`, then twice as long each time with up to `JITTER` more, at
    most `upper`. The jitter is a hash of name and count, so that a replay gives the same."""
    doubled = lower * 2.0 ** min(failures - 1, MAX_DOUBLINGS)
    share = zlib.crc32(f"{name}:{failures}".encode()) / 2**32 if failures > 1 else 0.0
    return min(upper, doubled * (1.0 + JITTER * share))


@dataclass(frozen=True)
class Blacklist:
    slots: Cooldowns = field(default_factory=Table)  # by slot id
    hosts: Cooldowns = field(default_factory=Table)  # each as a whole, with all of its slots
    links: Table[frozenset[str], Cooldown] = field(default_factory=Table)  # by the two machines at the ends
    # By host, which of its slots failed and when (the newest failure of each).
    failed: Table[HostId, tuple[tuple[SlotId, float], ...]] = field(default_factory=Table)

    def __bool__(self) -> bool:
        return bool(self.slots) or bool(self.hosts) or bool(self.links)

    def record_failure(self, slot: SlotId, host: HostId, slots: int, now: float, limits: Limits) -> Blacklist:
        """A worker of `slot` failed. The slot cools down; its host as a whole once more than one of its `slots` failed
        within `failure_window`, or its only one."""
        oldest = now - limits.failure_window
        earlier = tuple(f for f in self.failed.get(host, ()) if f[0] != slot and f[1] >= oldest)
        failed = (*earlier, (slot, now))
        hosts = self.hosts
        if len(failed) > 1 or slots <= 1:
            hosts = _add_failure(hosts, host, now, limits)
        slots_now = _add_failure(self.slots, slot, now, limits)
        return replace(self, slots=slots_now, hosts=hosts, failed=self.failed.put(host, failed))

    def record_success(self, slot: SlotId, host: HostId) -> Blacklist:
        """A worker of the slot takes part in a world, which proves slot and host."""
        return replace(self, slots=_with_success(self.slots, slot), hosts=_with_success(self.hosts, host))

    def record_dead_link(self, machines: frozenset[str], now: float, limits: Limits) -> Blacklist:
        """Workers on these two machines could not reach each other."""
        failures = self.links[machines].failures + 1 if machines in self.links else 1
        name = "-".join(sorted(machines))
        until = now + compute_cooldown(name, failures, limits.driver_timeout, LONGEST_LINK_COOLDOWN)
        return replace(self, links=self.links.put(machines, Cooldown(failures, now, until)))

    def find_unreachable(self, machines: Collection[str], now: float) -> set[str]:
        """The machines that cannot be in one world with all of these."""
        dead = [link for link, cooldown in self.links.items() if now < cooldown.until]
        return {end for link in dead for end in link if not link.isdisjoint(machines) and end not in machines}

    def forget_slot(self, slot: SlotId) -> Blacklist:
        """The slot is gone and its name is never used again; its host's failures stay."""
        return replace(self, slots=self.slots.drop(slot)) if slot in self.slots else self

    def forget_host(self, host: HostId) -> Blacklist:
        """The host is gone and its name is never used again."""
        if host not in self.failed:
            return self
        return replace(self, hosts=self.hosts.drop(host), failed=self.failed.drop(host))

    def find_host_return(self, host: HostId, now: float) -> float | None:
        """When the host may be used again; None: now."""
        return _find_end(self.hosts.get(host), now)

    def find_slot_return(self, slot: SlotId, host: HostId, now: float) -> float | None:
        """When a worker of that slot may come into a world; None: now."""
        times = [_find_end(self.slots.get(slot), now), self.find_host_return(host, now)]
        return max((time for time in times if time is not None), default=None)


def _find_end(cooldown: Cooldown | None, now: float) -> float | None:
    return cooldown.until if cooldown is not None and now < cooldown.until else None


def _add_failure(cooldowns: Cooldowns, name: str, now: float, limits: Limits) -> Cooldowns:
    before, failures, window = cooldowns.get(name), 1, limits.failure_window
    if before is not None and not (before.proven and now - max(before.last, before.until) > window):
        failures += before.failures  # which are not forgiven
    lower, upper = limits.cooldown_range
    return cooldowns.put(name, Cooldown(failures, now, now + compute_cooldown(name, failures, lower, upper)))


def _with_success(cooldowns: Cooldowns, name: str) -> Cooldowns:
    cooldown = cooldowns.get(name)
    if cooldown is None or cooldown.proven:
        return cooldowns
    return cooldowns.put(name, replace(cooldown, proven=True))
