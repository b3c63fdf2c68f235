"""Decides which workers, slots and worlds are gone, and changes the records accordingly.

Evidence comes from broken connections, reports of peers, silence (leases and R24, suspicion) and Spark. R12 (driver
silence): while the driver itself was cut off or paused, silence proves nothing. R18 (publication): an evicted member
may run on, and until it cannot, no world begins from a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages
from spark_elastic.protocol.driver.state import (
    DepartedWorker,
    JobStage,
    PossiblyAlive,
    SlotRecord,
    Transition,
    WorkerRecord,
    add_time,
)
from spark_elastic.protocol.types import NOT_RUNNING, STOPPED, WorkerId, WorkerStatus, heartbeat_interval

CHECKS_PER_LEASE = 20
CHECKS_PER_HEARTBEAT = 4  # where these are more
# Seconds. Imports keep a host busy, nothing waits for a worker that is not warm, and a new one would import again.
STARTING_LEASE = 30.0
MARGIN = 5.0  # seconds added to driver_timeout, for clocks that differ and for a last step
SILENCE = 0.6  # seconds for which no slot at all was heard, so that none is suspicious
LATE = 0.2  # seconds in which the driver has not looked, so that it may not have read what came
LONGEST_STOP = 0.25  # seconds for which a process that a signal has stopped may keep others waiting
WAITS = 0.05  # seconds that a member waits for others, from which on silence of others is suspicious
SHORTEST_DELAY = 0.75  # seconds by which a heartbeat may be late on any host, however punctual it was
# Likewise, where another worker's share has the same bits, while witnesses come all along: seconds from one to the next
# at most, and from the first to the last at least, in which a heartbeat of each slot was due.
SHORTEST_BITWISE_DELAY = 0.2
WITNESS_GAP, WITNESS_SPAN = 0.2, 0.25
LONGEST_DELAYS = 3  # so often the longest delay of a slot may come at once
DENSE_BEATS = 10  # heartbeats that are due in a time of which the driver asks whether it hears anybody
FORGET = 0.99  # of the longest delay, what is left of it after another heartbeat


def break_world(tx: Transition, reason: str, cause_unknown: bool = False) -> None:
    """Abort the running world. Further evidence has no effect, nor has any after the job's result: R15 (end)."""
    state = tx.state
    if state.stage is not JobStage.RUNNING or state.timers.done_since is not None:
        return
    state.current.broken_by, reason = tx.event_id, tx.cite(reason)
    for stall in state.current.stalled.values():
        reason = reason if stall in reason else f"{reason}; {stall}"
    state.stage = JobStage.REGROUPING
    state.current.break_reason, state.current.cause_unknown = reason, cause_unknown
    state.timers.leaving_since = tx.now
    tx.emit(do.AbortWorld(f"world {state.generation} is over: {reason}", state.fence))


def evict(
    tx: Transition, worker: WorkerRecord, reason: str, kill: bool = False, exit_unreported: bool = False
) -> None:
    """Count a worker as lost, and break its world if it is a member. kill: it may be alive; its slot kills it."""
    state = tx.state
    title = tx.describe(worker)
    if worker.worker in state.current.stalled:
        reason = f"{reason}; {state.current.stalled[worker.worker]}"
    if kill:
        _note_possibly_alive(tx, worker)
    cited = tx.cite(reason, state.current.broken_by if worker.is_member else "")
    remove_worker(tx, worker, DepartedWorker(cited, tx.event_id, exit_unreported, worker.took_part))
    state.launches.relaunch |= worker.is_member and not worker.draining
    if kill:
        tx.emit(do.StopWorker(f"{title} is evicted: {cited}", worker.worker, kill=True))
    if worker.is_member and worker.worker not in state.current.results:
        loss, current = f"{title} is lost: ", state.current
        if current.cause_unknown and worker.worker in current.suspected - current.late:
            current.break_reason, current.cause_unknown = loss + cited, False
        break_world(tx, loss + reason)


def evict_externally_lost(
    tx: Transition, worker: WorkerRecord, reason: str, kill: bool = False, exit_unreported: bool = False
) -> None:
    """Evict a worker where nothing points to the program: a signal, silence, or the end of its slot or host."""
    if worker.is_member:
        failures = tx.state.failures
        failures.externally_lost = failures.externally_lost.put(worker.worker, tx.state.generation)
    evict(tx, worker, reason, kill, exit_unreported)


def remove_worker(tx: Transition, worker: WorkerRecord, departed: DepartedWorker) -> None:
    """Move a worker's record from the living workers to the departed ones."""
    state = tx.state
    state.workers.record_departure(worker.worker, departed)
    state.connections.forget(worker.worker)
    slot = state.slots.get(worker.slot)
    if slot is not None and slot.worker == worker.worker:
        state.slots.put(replace(slot, worker=None))


def remove_slot(tx: Transition, slot: SlotRecord, reason: str, executor_lost: bool | None = None) -> None:
    """A slot task is gone, and its worker with it. executor_lost: Spark says so; None: the driver has it end."""
    state = tx.state
    worker = tx.find_worker(slot)
    if worker is not None:
        if executor_lost:
            _note_possibly_alive(tx, worker, executor_lost=True)
        evict_externally_lost(tx, worker, reason)
    elif executor_lost is not None:
        for name in state.workers.departed_of.get(slot.slot, ()):
            departed = state.workers.departed[name]
            if departed.exit_unreported and departed.took_part:
                # The world's break reason was announced before this was known.
                told = f"worker {name} was lost with its slot: {reason}"
                tx.emit(do.NotifyUser(tx.cite(told, departed.event_id)))
    state.slots.record_departure(slot, tx.cite(reason))
    state.blacklist = state.blacklist.forget_slot(slot.slot)
    state.failures.forget_slot(slot.slot)
    state.connections.forget(slot.slot)
    state.launches.update(slot.launch, more_slots=-1)


# ---- connections


def on_connection_lost(tx: Transition, event: on.ConnectionLost) -> None:
    state, name = tx.state, event.worker or event.slot
    connections = state.connections
    connections.reset = connections.reset | {name} if event.reset else connections.reset - {name}
    for worker, member in state.possibly_alive.find_by_connection(event.slot, event.worker).items():
        closed = member.connection_closed or not event.reset
        closed &= _ends_within_lease(tx, tx.now, member.last_seen)
        state.possibly_alive.update(worker, replace(member, connection_closed=closed))
    slot = state.slots.get(event.slot)
    if event.worker is None:
        if slot is not None and slot.disconnected_at is None:
            state.slots.put(replace(slot, disconnected_at=tx.now))
    elif event.worker in state.workers and event.worker not in connections.disconnected:
        connections.disconnected = connections.disconnected.put(event.worker, tx.now)
        connections.broke_at = tx.now
        if state.workers[event.worker].status is WorkerStatus.STARTING:
            connections.unstarted = connections.unstarted.put(event.worker, None)
        _check_connection(tx, event.worker)
    _mark_mass_disconnect(tx)


def on_connection_back(tx: Transition, event: on.ConnectionBack) -> None:
    state = tx.state
    _mark_mass_disconnect(tx)
    for name, member in state.possibly_alive.find_by_connection(event.slot, event.worker).items():
        state.possibly_alive.update(name, replace(member, connection_closed=False))
    slot = state.slots.get(event.slot)
    if event.worker is not None and event.worker in state.workers:
        mark_reconnected(tx, state.workers[event.worker])
    elif event.worker is None and slot is not None:
        state.slots.put(replace(slot, disconnected_at=None, last_seen=tx.now))


def mark_reconnected(tx: Transition, worker: WorkerRecord) -> WorkerRecord:
    """Record that the worker sent a message over a working connection. Returns its renewed record."""
    _mark_mass_disconnect(tx)
    tx.state.connections.mark_connected(worker.worker)
    return tx.state.workers.set_last_seen(worker, tx.now)


def suspect(tx: Transition, witness: WorkerId, suspects: tuple[WorkerId, ...]) -> None:
    """Note members that a peer blames for its broken group. That alone evicts no worker."""
    current = tx.state.current
    world = current.world
    seen = [name for name in suspects if world is not None and world.member(name) is not None]
    current.suspected |= set(seen)
    current.broken_links += tuple(frozenset((witness, name)) for name in seen if name != witness)
    for name in suspects:
        _check_connection(tx, name)


def _check_connection(tx: Transition, name: WorkerId) -> None:
    """Evict a worker whose connection is broken, if there is enough evidence: a peer's report, or, once it is clear
    that not all connections broke, that of its slot; else after `reconnect_grace`. If all connections broke together,
    the server lost them, and every worker has that time to reconnect."""
    state, connections = tx.state, tx.state.connections
    worker, since = state.workers.get(name), connections.disconnected.get(name)
    if worker is None or since is None or _is_mass_disconnect(tx):
        return
    broken = tx.now - max(since, connections.mass_disconnect_at, connections.driver_partitioned_at)
    slot = state.slots.get(worker.slot)
    window = state.limits.disconnect_window
    broke_alone = connections.mass_disconnect_at < since
    slot_since = slot.disconnected_at if slot is not None else None
    if broke_alone and name in state.current.suspected:
        reason = "its connection broke and a peer blames it"
    elif broke_alone and slot_since is not None and tx.now - max(since, slot_since) >= window:
        if _beats_are_dense(tx) and connections.heard_at < max(since, slot_since) + window / 2:
            return  # others would have been heard since then, if the driver were not cut off itself
        reason = "its connection and its slot's broke"
    elif broken >= state.limits.reconnect_grace:
        reason = f"its connection has been broken for {broken:.1f} s"
    else:
        return
    evict_externally_lost(tx, worker, reason, kill=True, exit_unreported=True)


def _mark_mass_disconnect(tx: Transition) -> None:
    """Remember that all workers were disconnected, as long as it lasts."""
    connections = tx.state.connections
    if connections.disconnected and _is_mass_disconnect(tx):
        connections.mass_disconnect_at = tx.now


def _is_mass_disconnect(tx: Transition) -> bool:
    """Whether every worker that ever had a connection has lost it. Workers that still start have none to lose. In a
    large job some have none that the driver could see break, so there it is enough that nobody is heard any more."""
    workers, connections, window = tx.state.workers, tx.state.connections, tx.state.limits.disconnect_window
    if len(connections.disconnected) - len(connections.unstarted) == len(workers) - workers.starting:
        return True
    unheard = (
        tx.now - connections.broke_at > window and connections.heard_at < connections.broke_at + window / 2
    )
    return bool(connections.disconnected) and unheard and _beats_are_dense(tx)


def _beats_are_dense(tx: Transition) -> bool:
    """Whether so many heartbeats are due within `disconnect_window` that none shows that the driver is cut off."""
    return len(tx.state.slots) * tx.state.limits.disconnect_window / get_interval(tx) >= DENSE_BEATS


def note_heard(tx: Transition) -> None:
    """A message has come."""
    _mark_mass_disconnect(tx)
    tx.state.connections.heard_at = tx.now


# ---- silence


def note_heartbeat(tx: Transition, slot: SlotRecord, event: messages.Heartbeat) -> SlotRecord:
    """Renews the slot's record, which is returned."""
    connections, interval = tx.state.connections, get_interval(tx)
    late = tx.now - slot.last_seen - max(slot.pace, interval)
    runs = event.state not in NOT_RUNNING
    stack = "" if runs else event.stack
    stopped_at = (slot.stopped_at or tx.now) if event.state == STOPPED else None
    delay = max(late, FORGET * slot.delay)
    slot = replace(slot, last_seen=tx.now, pace=interval, delay=delay, stack=stack, stopped_at=stopped_at)
    if stopped_at is not None:
        connections.next_lease_check = tx.now
    tx.state.slots.put(slot)
    worker = tx.state.workers.get(event.worker) if event.waits and event.worker is not None else None
    if worker is not None and worker.is_member and event.seconds >= WAITS and runs:
        if tx.now - connections.waited_at > WITNESS_GAP:
            connections.witnessed_since = tx.now
        connections.waited_at, connections.bitwise = tx.now, event.bitwise
    return slot


def get_interval(tx: Transition) -> float:
    return heartbeat_interval(tx.state.limits.lease, len(tx.state.slots))


def _get_check_interval(tx: Transition) -> float:
    return min(tx.state.limits.lease / CHECKS_PER_LEASE, get_interval(tx) / CHECKS_PER_HEARTBEAT)


def _get_shortest_delay(tx: Transition) -> float:
    """R12 (driver silence): a driver that hears others all along is not cut off itself."""
    connections = tx.state.connections
    hears = tx.now - connections.waited_at <= WITNESS_GAP
    hears &= connections.waited_at - connections.witnessed_since >= WITNESS_SPAN
    return SHORTEST_BITWISE_DELAY if connections.bitwise and hears else SHORTEST_DELAY


def notice_pause(tx: Transition) -> None:
    """Detect before each event that the driver was paused: it checked no leases for half a lease. Messages that came
    meanwhile are still unread, so the silence of the other slots proves nothing: R12 (driver silence)."""
    connections, lease = tx.state.connections, tx.state.limits.lease
    unchecked = tx.now - connections.last_lease_check
    if unchecked > lease / 2:
        connections.driver_partitioned_at = tx.now
    if unchecked > LATE and unchecked > 2 * _get_check_interval(tx):
        connections.driver_late_at = tx.now


def on_tick(tx: Transition, event: on.Tick) -> None:
    """Check broken connections, and now and then the leases."""
    state, connections, slots = tx.state, tx.state.connections, tx.state.slots
    _mark_mass_disconnect(tx)
    for name in connections.disconnected:
        _check_connection(tx, name)
    if tx.now < connections.next_lease_check:
        return
    lease, interval = state.limits.lease, get_interval(tx)
    connections.last_lease_check = tx.now
    connections.next_lease_check = tx.now + _get_check_interval(tx)
    seen = max((slots[w.slot].last_seen for w in state.workers.values() if w.slot in slots), default=None)
    silence = tx.now - seen if seen is not None else 0.0
    hears_nobody = _beats_are_dense(tx) and tx.now - connections.heard_at > LATE
    if hears_nobody or silence > max(SILENCE, 1.5 * interval):
        connections.driver_late_at = tx.now
    # R12 (driver silence): all slots fell silent although connections stand, so the driver is cut off, or was paused.
    # Training continues without it until `driver_timeout`, after which the workers have ended themselves.
    if lease / 2 < silence <= state.limits.driver_timeout and not _is_mass_disconnect(tx):
        connections.driver_partitioned_at = tx.now
        return
    shortest = min(lease, interval + _get_shortest_delay(tx))
    for worker in state.workers.values():
        slot = state.slots.get(worker.slot)
        silent_since = worker.last_seen if slot is None else min(worker.last_seen, slot.last_seen)
        if tx.now - silent_since > shortest or (slot is not None and slot.stopped_at is not None):
            _judge_silence(tx, worker, slot)
    _evict_silent_slots(tx)


def _judge_silence(tx: Transition, worker: WorkerRecord, slot: SlotRecord | None) -> None:
    """Evict the worker if it or its slot was silent for too long."""
    state = tx.state
    lease, reachable_since = state.limits.lease, state.connections.driver_partitioned_at
    limit = max(lease, STARTING_LEASE) if worker.status is WorkerStatus.STARTING else lease
    signs = [("its process has not run", worker.last_seen)]
    if slot is not None:
        signs.insert(0, ("its slot was silent", slot.last_seen))
    for sign, seen in signs:
        if tx.now - max(seen, reachable_since) > limit or _is_suspicious(tx, worker, slot, seen):
            reason = f"{sign} for {tx.now - seen:.1f} s"
            if slot is not None and slot.stack:
                reason += f", last seen in {slot.stack}"
            silences, window = state.failures.silences, state.limits.failure_window
            times = add_time(silences.get(worker.slot, ()), tx.now, window)
            state.failures.silences = silences.put(worker.slot, times)
            evict_externally_lost(tx, worker, reason, kill=True)
            return


def _is_suspicious(tx: Transition, worker: WorkerRecord, slot: SlotRecord | None, seen: float) -> bool:
    """R24 (suspicion): whether a member was silent for longer than its slot is otherwise late, and since `seen`, when
    its newest sign came, a heartbeat said that another member waits."""
    connections = tx.state.connections
    if slot is None or not worker.is_member or connections.waited_at <= seen:
        return False
    if slot.stopped_at is not None and seen == worker.last_seen:  # it is known, and not inferred from silence
        return tx.now - max(slot.stopped_at, connections.driver_late_at) > LONGEST_STOP
    # It was told its pace when the job had more slots, maybe.
    patience = max(slot.pace, get_interval(tx)) + max(_get_shortest_delay(tx), LONGEST_DELAYS * slot.delay)
    return tx.now - max(seen, connections.driver_late_at) > patience


def _evict_silent_slots(tx: Transition) -> None:
    """Evict slots without a worker that must have ended themselves under R12 (driver silence). If Spark has started
    their task again, their launch continues, and no event reports their end."""
    state = tx.state
    limit = state.limits.driver_timeout + MARGIN
    for slot in state.slots.values():
        silence = tx.now - max(slot.last_seen, state.connections.driver_partitioned_at)
        if slot.worker is None and silence > limit:
            remove_slot(tx, slot, f"slot {slot.slot} was silent for {silence:.1f} s")


# ---- evicted members that may be alive


def _note_possibly_alive(tx: Transition, worker: WorkerRecord, executor_lost: bool = False) -> None:
    """Remember an evicted member that may still run. Call it before its records change."""
    if not worker.is_member:
        return
    state, connections = tx.state, tx.state.connections
    slot = state.slots.get(worker.slot)
    seen = worker.last_seen if slot is None else max(worker.last_seen, slot.last_seen)
    until = seen + state.limits.driver_timeout + MARGIN
    disconnected: dict[str, float | None] = {worker.worker: connections.disconnected.get(worker.worker)}
    if slot is not None:
        disconnected[slot.slot] = slot.disconnected_at
    closed = any(
        at is not None and name not in connections.reset and _ends_within_lease(tx, at, seen)
        for name, at in disconnected.items()
    )
    state.possibly_alive.add(worker.worker, PossiblyAlive(until, seen, closed, executor_lost))


def hear_possibly_alive(tx: Transition, message: messages.DriverMessage) -> None:
    """An evicted member that gives a sign of life, however it came, is silent anew from now on: it may never receive
    that it shall end. A heartbeat speaks for the worker that it names, if that one runs."""
    state = tx.state
    if not state.possibly_alive.members:
        return
    for name, member in state.possibly_alive.find_by_connection(message.slot, None).items():
        if isinstance(message, messages.Heartbeat):
            speaks = message.worker == name and message.state not in NOT_RUNNING | {"D"}
        else:
            speaks = getattr(message, "worker", name) == name
        if speaks:
            until = tx.now + state.limits.driver_timeout + MARGIN
            state.possibly_alive.update(name, replace(member, until=until, last_seen=tx.now))


def _ends_within_lease(tx: Transition, at: float, last_seen: float) -> bool:
    """Whether the connection closed within a lease of the last message, hence not by a cut-off host's timeout."""
    return at - last_seen <= tx.state.limits.lease
