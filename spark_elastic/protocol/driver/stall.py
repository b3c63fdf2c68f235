"""Finds the members that keep the others of a world waiting, from the slots' heartbeats. Pure.

A member waits when its main thread is in a collective or asks for its next world. If a member has waited for long,
another one has not come: it works on, is stopped, or its slot is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import NOT_RUNNING, Member, SlotId, World

MAX_MISSED_HEARTBEATS = 2.5  # of a slot that is not silent
STATES = {
    "R": "runs (R)",
    "S": "sleeps (S)",
    "D": "waits for a device (D)",
    "T": "is stopped (T)",
    "Z": "has ended (Z)",
}
ENDED = ("", "X", "Z")  # states of a process that is no more


@dataclass(frozen=True)
class Stall:
    member: Member  # the one that the others wait for
    text: str  # who keeps others waiting, for how long, and what its process does


def find_stalls(
    world: World,
    heartbeats: Mapping[SlotId, tuple[float, Heartbeat]],
    now: float,
    after: float,
    since: float,
    interval: float,
    ended_at: float | None = None,
) -> tuple[Stall, ...]:
    """The members that have kept another waiting for `after` seconds or more.

    Args:
        heartbeats: the newest of each slot, with the time at which it came.
        since: when the world began.
        interval: seconds between two heartbeats of a slot.
        ended_at: when the world ended, None if it has not. Members that run on in it keep the next world waiting,
            even if no other is left whose heartbeats could say that it waits.
    """
    silent = MAX_MISSED_HEARTBEATS * max(1.0, interval)
    fresh = {slot: heartbeat for slot, (came, heartbeat) in heartbeats.items() if now - came <= silent}
    longest = min(
        now - since, max(_get_wait_seconds(member, fresh.get(member.slot)) for member in world.members)
    )
    no_wait_known = ended_at is not None and longest < after
    if ended_at is not None and no_wait_known:
        longest = now - ended_at
    if longest < after:
        return ()
    found = []
    for member in world.members:
        came, heartbeat = heartbeats.get(member.slot, (since, None))
        if no_wait_known and (member.slot not in fresh or heartbeat is None or heartbeat.state in ENDED):
            continue  # it is lost, not late
        if heartbeat is None or member.slot not in fresh:
            how = f"its slot has been silent for {now - came:.1f} s"
        elif heartbeat.worker == member.worker and heartbeat.state in NOT_RUNNING:
            how = f"its process {STATES.get(heartbeat.state, heartbeat.state)}"
        elif heartbeat.worker == member.worker and not heartbeat.waits and heartbeat.seconds >= after / 2:
            how = f"its process {STATES.get(heartbeat.state, f'is in state {heartbeat.state}')}"
        else:
            continue
        found.append(Stall(member, _format_stall(member, longest, how, heartbeat)))
    return tuple(found)


def _get_wait_seconds(member: Member, heartbeat: Heartbeat | None) -> float:
    """For how long a member is known to wait; 0.0 for one that does not, or cannot say."""
    if heartbeat is None or heartbeat.worker != member.worker:
        return 0.0
    return heartbeat.seconds if heartbeat.waits and heartbeat.state not in NOT_RUNNING else 0.0


def _format_stall(member: Member, waited: float, how: str, heartbeat: Heartbeat | None) -> str:
    stack = heartbeat.stack if heartbeat is not None and heartbeat.worker == member.worker else ""
    where = f", last seen in {stack}" if stack else ""
    return (
        f"rank {member.rank} (worker {member.worker}, host {member.host}) has kept others waiting for "
        f"{waited:.1f} s: {how}{where}"
    )
