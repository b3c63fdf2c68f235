"""Slots: when they are launched, which may take part, and when they are given back. A slot launch is a single-task
Spark job. Its task's attempts register as slots; the driver admits each, excludes it, or sends it back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol.driver.failure_detector import get_interval, remove_slot
from spark_elastic.protocol.driver.state import (
    DrainCause,
    JobStage,
    SlotLaunch,
    SlotRecord,
    Transition,
    WorkerRecord,
)
from spark_elastic.protocol.messages import ANOTHER_RELEASE, RegisterSlot, WorkerStraggles
from spark_elastic.protocol.types import HostId, Position, SlotId

# Seconds before a launch, by how many before it failed in a row. Spark alone decides where a slot job lands: without a
# delay it would use a host that has room but may not take part again and again. The last value is how long another host
# that gets room meanwhile may go unnoticed. The machine delays the job, not the launcher, so that a changed listing or
# a new executor launches it immediately.
BACK_OFF = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# A slot that was given to another job is launched again after the same delay as after so many failed launches.
FAILURES_AFTER_PREEMPTION = BACK_OFF.index(4.0) - 1
# Seconds of cooldown that a slot waits out with its warm worker. For a longer one it is given back, since its core may
# be useful elsewhere.
PARKING_LIMIT = 5.0

# ---- launches


def launch(tx: Transition, slot_launch: SlotLaunch, reason: str) -> None:
    """Launch a slot, now or after the back-off."""
    launches, number = tx.state.launches, slot_launch.number
    launches.put(slot_launch)
    back_off = BACK_OFF[min(slot_launch.failed_predecessors, len(BACK_OFF) - 1)]
    delay = max(back_off, _count_seconds_until_a_host_returns(tx))
    if delay:
        launches.delayed = launches.delayed.put(number, (tx.now + delay, reason))
    else:
        tx.emit(do.LaunchSlot(reason, number))


def launch_due(tx: Transition) -> None:
    """Launch what was delayed for long enough."""
    launches = tx.state.launches
    for number, (until, reason) in launches.delayed.items():
        if until <= tx.now:
            launches.delayed = launches.delayed.drop(number)
            tx.emit(do.LaunchSlot(reason, number))


def _skip_back_off(tx: Transition) -> None:
    """Drop the back-off of delayed launches: other hosts may be used than before."""
    launches = tx.state.launches
    earliest = tx.now + _count_seconds_until_a_host_returns(tx)
    for number, (until, reason) in launches.delayed.items():
        launches.delayed = launches.delayed.put(number, (min(earliest, until), reason))


def relaunch(tx: Transition) -> None:
    """Launch all slots again that were held back, because a member was lost."""
    launches = tx.state.launches
    launches.relaunch = False
    count, launches.held_back_count = launches.held_back_count, 0
    for _ in range(count):
        reason = "a member was lost, so a slot that was given back is asked for again"
        launch(tx, SlotLaunch(launches.next_launch), reason)


def on_launch_ended(tx: Transition, event: on.LaunchEnded) -> None:
    state = tx.state
    ended = state.launches.get(event.launch)
    if ended is None:
        return
    for slot in state.slots.of_launch(event.launch):
        remove_slot(tx, slot, f"slot job {event.launch} ended: {event.reason}", event.executor_lost)
    state.possibly_alive.end_launch(event.launch, event.executor_lost)
    state.launches.remove(event.launch)
    if state.timers.done_since is not None:
        return  # R15 (end): the result is there
    if event.cancelled:
        tx.end(do.JobOutcome.CANCELLED, f"slot job {event.launch} was cancelled: {event.reason}")
    else:
        _launch_successor(tx, ended, event.reason)


def _launch_successor(tx: Transition, ended: SlotLaunch, why: str) -> None:
    launches = tx.state.launches
    if ended.held_back:
        launches.held_back_count += 1
        return
    failed_predecessors = 0 if ended.got_warm or ended.executor_lost else ended.failed_predecessors + 1
    if failed_predecessors:
        launches.other_releases = launches.other_releases + 1 if ANOTHER_RELEASE in why else 0
        launches.last_failure = why
    successor = SlotLaunch(launches.next_launch, failed_predecessors)
    launch(tx, successor, f"slot job {ended.number} ended ({why})")


def find_blacklisted_hosts(tx: Transition) -> tuple[list[HostId], float] | None:
    """If every host that could take part is blacklisted: these hosts, and when the first returns; else None. Before the
    first world an unknown executor may be a good one, unless discovery lists the hosts by their own names."""
    state = tx.state
    listed, blacklist = dict(state.hosts.discovered or ()).keys(), state.blacklist
    out = [host for host in blacklist.hosts if blacklist.find_host_return(host, tx.now) is not None]
    if not out or (state.generation == 0 and not listed >= set(out)):
        return None
    # Hosts that were lost count as usable: a good one may come back, and is waited for.
    if state.hosts.find_usable().difference(out):
        return None
    return sorted(out), min(blacklist.hosts[host].until for host in out)


def _count_seconds_until_a_host_returns(tx: Transition) -> float:
    """For how long a new slot would only find blacklisted hosts."""
    found = find_blacklisted_hosts(tx) if tx.state.blacklist else None
    if found is None or found[1] == float("inf"):
        return 0.0
    return max(0.0, found[1] - tx.now - PARKING_LIMIT)


# ---- giving back


def give_back(tx: Transition, slot: SlotRecord, reason: str, hold_back: bool = False) -> None:
    """End the slot, and with it its worker, which must not be a member. hold_back: it is not asked for again before a
    member is lost. R14 (duplicates): beside another attempt that may take part it is excluded from all worlds instead,
    since Spark ends a task's other attempts once one returns."""
    slots = tx.state.slots
    if hold_back:
        tx.state.launches.update(slot.launch, held_back=True)
    others = slots.of_launch(slot.launch)
    if any(other.slot != slot.slot and other.slot not in slots.excluded for other in others):
        slots.excluded = slots.excluded.put(slot.slot, None)
        return
    _release(tx, slot, reason)


def _release(tx: Transition, slot: SlotRecord, reason: str) -> None:
    remove_slot(tx, slot, reason)
    tx.emit(do.ReleaseSlot(reason, slot.slot))


def release_idle(tx: Transition) -> None:
    """Give back slots that the world has had no room for since `idle_slot_timeout`."""
    state = tx.state
    assert state.world is not None
    timeout = state.limits.idle_slot_timeout
    if state.workers.draining or state.world.size < state.limits.capacity:
        return
    for name in tuple(state.workers.waiting):
        worker = state.workers[name]
        slot = state.slots[worker.slot]
        slot_launch = state.launches.get(slot.launch)
        # R14 (duplicates): an attempt that returns first would have Spark end the other one.
        alone = slot_launch is None or slot_launch.slots == 1
        if alone and tx.now - max(worker.arrived_at, state.timers.published_at) >= timeout:
            give_back(tx, slot, f"slot {slot.slot} was not needed for {timeout:g} s", hold_back=True)


def on_slots_wanted(tx: Transition, event: on.SlotsWanted) -> None:
    """R17 (gathering): give slots back if another job needs them. `start_timeout` restarts: what lacks is in use."""
    state = tx.state
    if not state.lacks_slots:
        return
    if not event.in_use:
        _preempt(tx, event.reason)
    if state.timers.too_few_since is not None:
        state.timers.too_few_since = tx.now


def _preempt(tx: Transition, reason: str) -> None:
    """Give all slots back to another job, to ask for them again later; P3 (no rollback): one with the newest state
    stays."""
    state = tx.state
    if state.stage is JobStage.RUNNING or state.workers.not_left:
        return
    state.launches.preempted = reason
    survivors = tx.list_survivors()
    newest = find_newest_position(survivors)
    holders = [worker for worker in survivors if newest is not None and worker.position == newest]
    holders.sort(key=lambda worker: bool(worker.draining))
    # With all attempts of its task: R14 (duplicates).
    staying = state.slots[holders[0].slot].launch if holders else None
    for slot in tuple(state.slots.values()):
        if slot.launch == staying:
            continue
        failures = FAILURES_AFTER_PREEMPTION
        state.launches.update(slot.launch, got_warm=False, failed_predecessors=failures)
        _release(tx, slot, reason)


def find_newest_position(workers: Sequence[WorkerRecord]) -> Position | None:
    """The highest position of the workers; None if no worker has one."""
    return max((worker.position for worker in workers if worker.position is not None), default=None)


def on_slot_registered(tx: Transition, event: RegisterSlot) -> None:
    state = tx.state
    known = state.slots.get(event.slot)
    slot_launch = state.launches.get(event.launch)
    if known is not None:
        state.slots.put(replace(known, last_seen=tx.now))
    elif event.slot in state.slots.departed:
        release_departed(tx, event.slot)
    elif slot_launch is None:
        _refuse(tx, event.slot, f"slot {event.slot} belongs to slot job {event.launch}, which is over")
    else:
        pace, extra = get_interval(tx), slot_launch.slots > 0
        slot = SlotRecord(event.slot, event.launch, event.host, tx.now, pace=pace, extra=extra)
        _register(tx, replace(slot, node=event.node, unfit=event.unfit, kept=event.kept))


def _register(tx: Transition, slot: SlotRecord) -> None:
    state = tx.state
    state.launches.other_releases = 0
    why = _explain_refusal(tx, slot)
    if why and not slot.extra:
        _refuse(tx, slot.slot, why)
        return
    state.launches.update(slot.launch, more_slots=1)
    state.hosts.add(slot.host, slot.machine)
    state.slots.put(slot)
    if why:
        give_back(tx, slot, why)


def _refuse(tx: Transition, slot: SlotId, reason: str) -> None:
    tx.state.slots.refuse(slot, reason)
    tx.emit(do.ReleaseSlot(reason, slot))


def release_departed(tx: Transition, slot: SlotId) -> None:
    """Tell a departed slot that still sends messages to end."""
    reason = tx.state.slots.departed.get(slot)
    if reason is not None:
        tx.emit(do.ReleaseSlot(f"slot {slot} is no longer part of the job: {reason}", slot))


def on_host_appeared(tx: Transition, event: on.HostAppeared) -> None:
    """Launch delayed slots now: failed launches on other hosts say nothing about the new one."""
    if tx.state.hosts.add(event.host):
        _skip_back_off(tx)


def on_host_lost(tx: Transition, event: on.HostLost) -> None:
    state = tx.state
    state.hosts.draining = state.hosts.draining.drop(event.host)
    state.blacklist = state.blacklist.forget_host(event.host)
    for slot in state.slots.on_host(event.host):
        state.possibly_alive.lose_executor(slot.slot)
        remove_slot(tx, slot, f"host {event.host} is lost: {event.reason}", executor_lost=True)
        state.launches.update(slot.launch, executor_lost=True)


def on_hosts_discovered(tx: Transition, event: on.HostsDiscovered) -> None:
    """Members that discovery does not list drain, a planned change, unless it lists them again in time."""
    state = tx.state
    state.hosts.discovered = event.hosts
    _skip_back_off(tx)
    allowed = _find_allowed_slots(tx)
    for slot in state.slots.values():
        worker = tx.find_worker(slot)
        why = f"discovery does not list host {slot.host} with slot {slot.slot}"
        if slot.slot in allowed:
            if worker is not None and worker.drain_cause is DrainCause.NOT_DISCOVERED:
                state.workers.put(replace(worker, draining="", drain_cause=None))
        elif worker is not None and worker.is_member:
            _drain(tx, worker, why, DrainCause.NOT_DISCOVERED)
        else:
            give_back(tx, slot, why)


def admit_excluded(tx: Transition) -> None:
    """Admit excluded slots that may take part now, and give back the others."""
    state = tx.state
    for name in tuple(state.slots.excluded):
        slot = state.slots[name]
        why = _explain_refusal(tx, slot)
        if why:
            give_back(tx, slot, why)
        else:
            state.slots.excluded = state.slots.excluded.drop(name)


def _explain_refusal(tx: Transition, slot: SlotRecord) -> str:
    """Why a new or excluded slot cannot take part, "" if it can."""
    state = tx.state
    if slot.unfit:
        return slot.unfit
    if why := explain_drain(tx, slot):
        return why
    until = state.blacklist.find_host_return(slot.host, tx.now)
    if until is not None and until - tx.now > PARKING_LIMIT:
        return f"host {slot.host} is blacklisted for another {until - tx.now:.1f} s"
    if state.hosts.discovered is None:
        return ""
    room = dict(state.hosts.discovered)
    name = _match_discovered(slot, room)
    if name is None:
        return f"host {slot.host} is not among those that discovery lists"
    taken = sum(_match_discovered(other, room) == name for other in state.slots.list_admitted())
    if taken < room[name]:
        return ""
    return f"discovery lists {room[name]} slots for host {name}, and they are taken"


def explain_drain(tx: Transition, slot: SlotRecord) -> str:
    state = tx.state
    drains = state.hosts.draining.get(slot.host) or state.hosts.draining.get(slot.node)
    if drains:
        return f"host {slot.host} drains: {drains}"
    slot_launch = state.launches.get(slot.launch)
    if slot_launch is not None and slot_launch.held_back:
        return f"slot {slot.slot} was asked to leave"
    return ""


def explain_missing_discovery(tx: Transition, slot: SlotRecord) -> str:
    if tx.state.hosts.discovered is None or slot.slot in _find_allowed_slots(tx):
        return ""
    return f"discovery does not list host {slot.host} with slot {slot.slot}"


def _find_allowed_slots(tx: Transition) -> set[SlotId]:
    """Slots that discovery allows: of each host as many as discovery lists, members of the world first."""
    state = tx.state
    if state.hosts.discovered is None:
        return {slot.slot for slot in state.slots.list_admitted()}
    room = dict(state.hosts.discovered)
    taken: Counter[str] = Counter()
    allowed = set()
    members = {worker.slot for worker in tx.list_survivors()}
    for slot in sorted(state.slots.list_admitted(), key=lambda slot: slot.slot not in members):
        name = _match_discovered(slot, room)
        if name is not None and taken[name] < room[name]:
            taken[name] += 1
            allowed.add(slot.slot)
    return allowed


def _match_discovered(slot: SlotRecord, room: dict[str, int]) -> str | None:
    """The name by which discovery knows the slot's host: its id or its machine's name."""
    return slot.host if slot.host in room else slot.node if slot.node in room else None


# ---- drains


def on_drain_requested(tx: Transition, event: on.DrainRequested) -> None:
    state = tx.state
    if event.host is not None:
        state.hosts.draining = state.hosts.draining.put(event.host, event.reason)
    alone = event.host is None  # its slot is not asked for again
    concerned = [slot for slot in state.slots.values() if _concerns(event, slot, tx.find_worker(slot))]
    for slot in concerned:
        worker = tx.find_worker(slot)
        if worker is None or not worker.is_member:
            give_back(tx, slot, f"slot {slot.slot} drains: {event.reason}", hold_back=alone)
            continue
        _drain(tx, worker, event.reason, DrainCause.BY_USER if alone else DrainCause.HOST)
        if alone:
            state.launches.update(slot.launch, held_back=True)
    if not concerned and event.by_user:
        _drain_without_target(tx, event)
    elif event.by_user and state.world is not None:
        size, least = state.world.size, state.limits.min_workers
        if (staying := size - state.workers.draining) < least:
            text = f"only {staying} of {size} workers would stay, and min_workers is {least}"
            tx.emit(do.NotifyUser(f"a drain waits until others join ({event.reason}): {text}"))


def _concerns(drain: on.DrainRequested, slot: SlotRecord, worker: WorkerRecord | None) -> bool:
    if drain.host is not None:
        return drain.host in (slot.host, slot.node)
    return worker is not None and (
        drain.worker == worker.worker or (drain.rank is not None and drain.rank == worker.rank)
    )


def on_worker_straggles(tx: Transition, event: WorkerStraggles) -> None:
    """Have a straggler replaced, unless the world would be too small without it."""
    worker, world = tx.state.workers.get(event.worker), tx.state.world
    if worker is None or not worker.is_member or event.fence != tx.state.fence:
        return
    assert world is not None
    if world.size > tx.state.limits.min_workers:
        _drain(tx, worker, event.reason, DrainCause.STRAGGLER)


def _drain(tx: Transition, worker: WorkerRecord, reason: str, cause: DrainCause) -> None:
    """Make a member leave at the next boundary. A lasting cause replaces one that can be undone."""
    if not worker.draining or worker.drain_cause is DrainCause.NOT_DISCOVERED:
        tx.state.workers.put(replace(worker, draining=tx.cite(reason), drain_cause=cause))


def carry_out_waiting_drains(tx: Transition) -> None:
    """Carry out the drain requests for workers and ranks that came before the first world."""
    hosts = tx.state.hosts
    if hosts.waiting_drains and tx.state.generation:
        waiting, hosts.waiting_drains = hosts.waiting_drains, ()
        for event in waiting:
            on_drain_requested(tx, event)


def _drain_without_target(tx: Transition, event: on.DrainRequested) -> None:
    state = tx.state
    if event.host is not None:
        text = f"no slot is on host {event.host}; a slot that registers there will not be admitted"
    elif state.generation == 0:
        state.hosts.waiting_drains = (*state.hosts.waiting_drains, event)
        return
    elif event.worker is not None:
        text = f"worker {event.worker} is not alive in this job, so nothing changes"
    else:
        size = state.world.size if state.world is not None else 0
        text = f"rank {event.rank} does not live in world {state.generation} of {size} workers, so nothing changes"
    tx.emit(do.NotifyUser(f"a drain concerns no worker ({event.reason}): {text}"))
