"""Who keeps the others of a world waiting: decided from what the slots' beats say. Pure.

A member waits when its main thread is in an exchange or asks for its next world. Somebody who has done that for long
shows that somebody else has not come: one that works on, is stopped, or whose slot is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import NOT_RUNNING, Member, SlotId, World

SILENT_BEATS = 2.5  # that have not come from a slot
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
    member: Member
    text: str


def stalls(
    world: World,
    beats: Mapping[SlotId, tuple[float, Heartbeat]],
    now: float,
    after: float,
    since: float,
    beat_every: float,
    over: float | None = None,
) -> tuple[Stall, ...]:
    """The members that have kept another waiting for `after` seconds or more; `since`: when the world began.

    beats: the newest of each slot, with the time at which it came. beat_every: seconds between two of them.
    over: since when the world is, so that
    those who run in it keep the next one waiting, though no other may be left who could say that it waits.
    """
    silent = SILENT_BEATS * max(1.0, beat_every)
    fresh = {slot: beat for slot, (came, beat) in beats.items() if now - came <= silent}
    longest = min(now - since, max(_waited(member, fresh.get(member.slot)) for member in world.members))
    alone = over is not None and longest < after
    if over is not None and alone:
        longest = now - over
    if longest < after:
        return ()
    found = []
    for member in world.members:
        came, beat = beats.get(member.slot, (since, None))
        if alone and (member.slot not in fresh or beat is None or beat.state in ENDED):
            continue  # it is lost by then, not late
        if beat is None or member.slot not in fresh:
            how = f"its slot has been silent for {now - came:.1f} s"
        elif beat.worker == member.worker and beat.state in NOT_RUNNING:
            how = f"its process {STATES.get(beat.state, beat.state)}"
        elif beat.worker == member.worker and not beat.waits and beat.seconds >= after / 2:
            how = f"its process {STATES.get(beat.state, f'is in state {beat.state}')}"
        else:
            continue
        found.append(Stall(member, _sentence(member, longest, how, beat)))
    return tuple(found)


def _waited(member: Member, beat: Heartbeat | None) -> float:
    """For how long a member is known to wait; 0.0 for one that does not, or cannot say."""
    if beat is None or beat.worker != member.worker:
        return 0.0
    return beat.seconds if beat.waits and beat.state not in NOT_RUNNING else 0.0


def _sentence(member: Member, waited: float, how: str, beat: Heartbeat | None) -> str:
    stack = beat.stack if beat is not None and beat.worker == member.worker else ""
    where = f", last seen in {stack}" if stack else ""
    return (
        f"rank {member.rank} (worker {member.worker}, host {member.host}) has kept others waiting for "
        f"{waited:.1f} s: {how}{where}"
    )
