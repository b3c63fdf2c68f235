"""Who may take part: hosts that discovery lists, and drains asked for. Part of the driver machine; pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import NotifyUser
from spark_elastic.protocol.driver.jobs import PARKED_FOR, give_back, hasten
from spark_elastic.protocol.driver.state import Leave, SlotRecord, Turn, WorkerRecord
from spark_elastic.protocol.types import SlotId


def refusal(turn: Turn, slot: SlotRecord) -> str:
    """Why a slot that comes up, or is barred, cannot take part, "" if it can."""
    state = turn.state
    if slot.unfit:
        return slot.unfit
    order = _ordered_away(turn, slot)
    if order:
        return order
    until = state.blacklist.host_until(slot.host, turn.now)
    if until is not None and until - turn.now > PARKED_FOR:
        return f"host {slot.host} is blacklisted for another {until - turn.now:.1f} s"
    if state.listed is None:
        return ""
    room = dict(state.listed)
    name = _listed_as(slot.host, slot.node, room)
    if name is None:
        return f"host {slot.host} is not among those that discovery lists"
    taken = sum(_listed_as(other.host, other.node, room) == name for other in _unbarred(turn))
    return (
        ""
        if taken < room[name]
        else f"discovery lists {room[name]} slots for host {name}, and they are taken"
    )


def look_at_barred(turn: Turn) -> None:
    """A barred slot is let in once nothing speaks against it, and sent back once no attempt beside it is let in."""
    state = turn.state
    for name in tuple(state.barred):
        slot = state.slots[name]
        why = refusal(turn, slot)
        if why:
            give_back(turn, slot, why)
        else:
            state.barred = state.barred.drop(name)


def hosts_listed(turn: Turn, event: on.HostsDiscovered) -> None:
    """A listing causes at most a planned change: members no longer listed drain, unless listed again in time."""
    state = turn.state
    state.listed = event.hosts
    hasten(turn)
    allowed = _allowed(turn)
    for slot in tuple(state.slots.values()):
        worker = state.workers.get(slot.worker) if slot.worker is not None else None
        if slot.slot in allowed:
            if worker is not None and worker.leave is Leave.UNLISTED:
                stay(turn, worker)
        elif worker is not None and worker.rank is not None:
            leave(turn, worker, f"discovery does not list host {worker.host} with that slot", Leave.UNLISTED)
        else:
            give_back(turn, slot, f"discovery does not list host {slot.host} with slot {slot.slot}")


def unwanted(turn: Turn, slot: SlotRecord) -> str:
    """Why a new worker of a slot shall not begin, "" if it shall: its member was about to leave, and was lost first."""
    state = turn.state
    order = _ordered_away(turn, slot)
    if order:
        return order
    if state.listed is not None and slot.slot not in _allowed(turn):
        return f"discovery does not list host {slot.host} with slot {slot.slot}"
    return ""


def _ordered_away(turn: Turn, slot: SlotRecord) -> str:
    state = turn.state
    drains = state.draining_hosts.get(slot.host) or state.draining_hosts.get(slot.node)
    if drains:
        return f"host {slot.host} drains: {drains}"
    job = state.jobs.get(slot.job)
    if job is not None and job.withheld:
        return f"slot {slot.slot} was asked to leave"
    return ""


def _listed_as(host: str, node: str, listed: dict[str, int]) -> str | None:
    """The name by which a listing knows a host."""
    return host if host in listed else node if node in listed else None


def _allowed(turn: Turn) -> set[SlotId]:
    """Slots that may take part: of each listed host as many as it is listed with, members of the world first."""
    state = turn.state
    if state.listed is None:
        return {slot.slot for slot in _unbarred(turn)}
    room = dict(state.listed)
    taken: Counter[str] = Counter()
    allowed = set()
    for slot in sorted(_unbarred(turn), key=lambda slot: not _is_member(turn, slot)):
        name = _listed_as(slot.host, slot.node, room)
        if name is not None and taken[name] < room[name]:
            taken[name] += 1
            allowed.add(slot.slot)
    return allowed


def _unbarred(turn: Turn) -> list[SlotRecord]:
    """Slots that no rule but the listing keeps out."""
    barred = turn.state.barred
    return [slot for slot in turn.state.slots.values() if slot.slot not in barred]


def _is_member(turn: Turn, slot: SlotRecord) -> bool:
    worker = turn.state.workers.get(slot.worker) if slot.worker is not None else None
    return worker is not None and worker.rank is not None


def drain_requested(turn: Turn, event: on.DrainRequested) -> None:
    state = turn.state
    if event.host is not None:
        state.draining_hosts = state.draining_hosts.put(event.host, event.reason)
    kind = Leave.BY_HAND if event.host is None else Leave.HOST
    met = False
    for slot in tuple(state.slots.values()):
        worker = state.workers.get(slot.worker) if slot.worker is not None else None
        by_host = event.host is not None and event.host in (slot.host, slot.node)
        by_worker = worker is not None and (
            event.worker == worker.worker or (event.rank is not None and event.rank == worker.rank)
        )
        if not by_host and not by_worker:
            continue
        met = True
        if worker is not None and worker.rank is not None:
            leave(turn, worker, event.reason, kind)
            job = state.jobs.get(slot.job)
            if kind is Leave.BY_HAND and job is not None:
                state.jobs = state.jobs.put(slot.job, replace(job, withheld=True))
        else:
            give_back(turn, slot, f"slot {slot.slot} drains: {event.reason}", withhold=kind is Leave.BY_HAND)

    if not met and event.by_user:
        _met_nobody(turn, event)


def carry_out_early_orders(turn: Turn) -> None:
    """Carry out the orders for workers and ranks that came before the first world."""
    state = turn.state
    if state.early and state.generation:
        early, state.early = state.early, ()
        for event in early:
            drain_requested(turn, event)


def _met_nobody(turn: Turn, event: on.DrainRequested) -> None:
    state = turn.state
    if event.host is not None:
        text = f"no slot is on host {event.host}; one that comes up there is not let in"
    elif state.generation == 0:
        state.early = (*state.early, event)
        return
    elif event.worker is not None:
        text = f"worker {event.worker} is not alive in this job, so nothing changes"
    else:
        size = state.world.size if state.world is not None else 0
        text = f"rank {event.rank} does not live in world {state.generation} of {size} workers, so nothing changes"
    turn.say(NotifyUser(f"a drain met nobody ({event.reason}): {text}"))


def leave(turn: Turn, worker: WorkerRecord, reason: str, kind: Leave) -> None:
    """A member shall leave at the next boundary. What cannot be undone outweighs what can."""
    state = turn.state
    if worker.draining and worker.leave is not Leave.UNLISTED:
        return
    state.draining += not worker.draining
    turn.put(replace(worker, draining=reason, leave=kind))


def stay(turn: Turn, worker: WorkerRecord) -> None:
    turn.state.draining -= 1
    turn.put(replace(worker, draining="", leave=None))
