"""Who is in the next world: survivors in seniority, then newcomers, within the limits and without those who drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spark_elastic.protocol.driver.state import WorkerRecord
from spark_elastic.protocol.types import HostId, Limits, Member, Position, SlotId, WorkerId


def capacity(limits: Limits) -> int:
    """The largest world (R8: never more workers than rows in a step)."""
    if limits.max_global_batch is None:
        return limits.max_workers
    return min(limits.max_workers, limits.max_global_batch)


def wanted_at_start(limits: Limits) -> int:
    """R16: with so many workers the first world begins at once."""
    return min(limits.num_workers, capacity(limits))


def compose(
    survivors: Sequence[WorkerRecord], newcomers: Sequence[WorkerRecord], limits: Limits
) -> list[WorkerRecord]:
    """Members of the next world in order of rank.

    survivors: the previous world's living members in its rank order (R4). newcomers: warm, without state, in order
    of arrival. A survivor that drains stays on only as far as it is needed: as the holder of the newest state, or to
    keep `min_workers`; nobody loses state to a drain.
    """
    room = capacity(limits)
    staying = [worker for worker in survivors if not worker.draining]
    leaving = [worker for worker in survivors if worker.draining]
    kept: list[WorkerRecord] = []
    newest = newest_position(survivors)
    if newest != newest_position(staying):
        kept = [next(worker for worker in leaving if worker.position == newest)]
    joining = list(newcomers[: max(0, room - len(staying) - len(kept))])
    missing = limits.min_workers - len(staying) - len(kept) - len(joining)
    kept += [worker for worker in leaving if worker not in kept][: max(0, missing)]
    chosen = {worker.worker for worker in (*staying, *kept)}
    return [worker for worker in survivors if worker.worker in chosen] + joining


def newest_position(workers: Sequence[WorkerRecord]) -> Position | None:
    """The highest position among them; None where nobody has one."""
    return max((worker.position for worker in workers if worker.position is not None), default=None)


def names(workers: Sequence[str], most: int = 8) -> str:
    """For sentences: all of a few, some of many."""
    shown = ", ".join(workers[:most])
    return shown if len(workers) <= most else f"{shown} and {len(workers) - most} more"


# Ranks: the members of a world with local and cross ranks, and its source, from its workers in order of rank.


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
