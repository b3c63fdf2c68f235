"""Ranks: the members of a world with local and cross ranks, and its source, from its workers in order of rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spark_elastic.protocol.types import HostId, Member, Position, SlotId, WorkerId


@dataclass(frozen=True)
class Place:
    """A worker that gets a rank. `position`: of the state it brings, None for a newcomer."""

    worker: WorkerId
    slot: SlotId
    host: HostId
    position: Position | None


def assign(places: Sequence[Place]) -> tuple[Member, ...]:
    """Members in the order given. Local ranks count a host's members; cross ranks count, over the hosts in order of
    their first member, the members with an equal local rank (Horovod's definition)."""
    on_host: Counter[HostId] = Counter()
    locals_: list[int] = []
    for place in places:
        locals_.append(on_host[place.host])
        on_host[place.host] += 1
    cross: dict[HostId, list[int]] = {}  # host -> cross rank by local rank
    width: Counter[int] = Counter()  # local rank -> how many hosts have it
    for host, size in on_host.items():
        cross[host] = [width[local] for local in range(size)]
        width.update(range(size))
    return tuple(
        Member(
            worker=place.worker,
            slot=place.slot,
            host=place.host,
            rank=rank,
            local_rank=local,
            local_size=on_host[place.host],
            cross_rank=cross[place.host][local],
            cross_size=width[local],
            position=place.position,
        )
        for rank, (place, local) in enumerate(zip(places, locals_, strict=True))
    )


def source_of(places: Sequence[Place]) -> int | None:
    """R4: the lowest rank among those at the highest position; None where nobody brings one."""
    highest = max((place.position for place in places if place.position is not None), default=None)
    if highest is None:
        return None
    return next(rank for rank, place in enumerate(places) if place.position == highest)
