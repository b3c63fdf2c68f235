"""Slot jobs: when one is launched, given back, withheld and asked for again. Part of the driver machine; pure."""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol.commands import LaunchSlot, ReleaseSlot
from spark_elastic.protocol.driver.evidence import lose_slot
from spark_elastic.protocol.driver.membership import capacity, newest_position
from spark_elastic.protocol.driver.state import JobRecord, PutOff, SlotEnd, SlotRecord, Stage, Turn
from spark_elastic.protocol.types import HostId, SlotId

# Seconds before a slot job is launched, by fruitless predecessors. A host that may not be used and has room would be
# found again and again; the last is how long another one that gets room meanwhile is not noticed.
BACK_OFF = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# What was left to another job is asked for again as after so many fruitless predecessors.
YIELDED = BACK_OFF.index(4.0) - 1
# Seconds of cooldown that a slot waits out with its warm worker; for a longer one it is given back.
PARKED_FOR = 5.0


def launch(turn: Turn, job: JobRecord, reason: str) -> None:
    state = turn.state
    state.jobs = state.jobs.put(job.job, job)
    state.next_job = job.job + 1
    delay = max(BACK_OFF[min(job.fruitless, len(BACK_OFF) - 1)], _until_a_host_returns(turn))
    if delay:
        state.put_off = state.put_off.put(job.job, PutOff(turn.now + delay, reason))
    else:
        turn.say(LaunchSlot(reason, job.job))


def launch_due(turn: Turn) -> None:
    """Launch the slot jobs that were put off for long enough."""
    state = turn.state
    for job, put_off in tuple(state.put_off.items()):
        if put_off.until <= turn.now:
            state.put_off = state.put_off.drop(job)
            turn.say(LaunchSlot(put_off.reason, job))


def hasten(turn: Turn) -> None:
    """Other hosts may be used than before: no slot job waits for the fruitless ones before it."""
    state = turn.state
    until = turn.now + _until_a_host_returns(turn)
    for job, put_off in tuple(state.put_off.items()):
        state.put_off = state.put_off.put(job, replace(put_off, until=min(until, put_off.until)))


def follow(turn: Turn, ended: JobRecord, why: str) -> None:
    """A slot job is over: another takes its place, unless it was withheld."""
    state = turn.state
    if ended.withheld:
        state.withheld += 1
        return
    fruitless = 0 if ended.warmed or ended.host_lost else ended.fruitless + 1
    if fruitless:
        state.fruitless_end = why
    launch(turn, JobRecord(state.next_job, fruitless), f"slot job {ended.job} ended ({why})")


def give_back(turn: Turn, slot: SlotRecord, reason: str, withhold: bool = False) -> None:
    """The slot shall end, and with it its worker, which must not be a member of a world.

    R14: beside another attempt that may take part it waits, out of all worlds, since Spark ends a task's other attempts
    once one returns.
    """
    state = turn.state
    job = state.jobs.get(slot.job)
    if job is not None and withhold:
        state.jobs = state.jobs.put(slot.job, replace(job, withheld=True))
    if any(other.slot != slot.slot and other.slot not in state.barred for other in turn.slots_of(slot.job)):
        state.barred = state.barred.put(slot.slot, None)
        return
    _release(turn, slot, reason)


def _release(turn: Turn, slot: SlotRecord, reason: str) -> None:
    lose_slot(turn, slot, reason, SlotEnd.TOLD)
    turn.say(ReleaseSlot(reason, slot.slot))


def refuse(turn: Turn, slot: SlotId, reason: str) -> None:
    """A slot that registers is not wanted."""
    turn.state.gone_slots = turn.state.gone_slots.put(slot, reason)
    turn.say(ReleaseSlot(reason, slot))


def recall(turn: Turn) -> None:
    """A member was lost: whatever was withheld is asked for again."""
    state = turn.state
    state.recall = False
    count, state.withheld = state.withheld, 0
    for _ in range(count):
        launch(
            turn,
            JobRecord(state.next_job),
            "a member was lost, so a slot that was given back is asked for again",
        )


def release_idle(turn: Turn) -> None:
    """Slots that the world has had no room for since `idle_slot_timeout` give their cores back."""
    state = turn.state
    assert state.world is not None
    timeout = state.limits.idle_slot_timeout
    if state.draining or state.world.size < capacity(state.limits):
        return
    for name in tuple(state.waiting):
        worker = state.workers[name]
        slot = state.slots[worker.slot]
        job = state.jobs.get(slot.job)
        # R14: an attempt that returns first would have Spark end the other one.
        alone = job is None or job.slots == 1
        if alone and turn.now - max(worker.arrived, state.published_at) >= timeout:
            give_back(turn, slot, f"slot {slot.slot} was not needed for {timeout:g} s", withhold=True)


def yield_slots(turn: Turn, reason: str) -> None:
    """R17: short of a world, leave the slots to another job, all attempts of them, and ask again later. A survivor that
    holds the newest state stays (P3)."""
    state = turn.state
    if state.stage is Stage.RUNNING or state.absent:
        return
    state.yielded = reason
    survivors = turn.survivors()
    newest = newest_position(survivors)
    holders = [worker for worker in survivors if newest is not None and worker.position == newest]
    holders.sort(key=lambda worker: bool(worker.draining))  # rather one that need not leave, else the first
    # With all attempts of its task: one that returned would have Spark end the survivor (R14).
    kept = state.slots[holders[0].slot].job if holders else None
    for slot in tuple(state.slots.values()):
        if slot.job == kept:
            continue
        job = state.jobs.get(slot.job)
        if job is not None:
            state.jobs = state.jobs.put(job.job, replace(job, warmed=False, fruitless=YIELDED))
        _release(turn, slot, reason)


def strike(turn: Turn, slot: SlotId, host: HostId) -> None:
    """A worker of that slot failed by its own doing: slot or host are not used for a while."""
    state = turn.state
    mine = turn.slots_on(host)
    listed = dict(state.listed or ()).get(host, 0)
    state.blacklist = state.blacklist.strike(slot, host, max(len(mine), listed), turn.now, state.limits)
    until = state.blacklist.host_until(host, turn.now)
    if until is None or until - turn.now <= PARKED_FOR:
        return
    for record in mine:
        worker = state.workers.get(record.worker) if record.worker is not None else None
        if worker is None or worker.rank is None:
            give_back(turn, record, f"host {host} is blacklisted for {until - turn.now:.1f} s")


def all_blacklisted(turn: Turn) -> tuple[list[HostId], float] | None:
    """If every host that could take part is blacklisted: these hosts, and when the first returns; else None.

    Without a listing a host that was lost, with its failures forgotten, could come back.
    """
    state = turn.state
    out = [host for host in state.blacklist.hosts if state.blacklist.host_until(host, turn.now) is not None]
    if not out or (state.listed is None and state.generation == 0):
        return None
    known = state.hosts if state.listed is None else set(dict(state.listed))
    if known - set(out):
        return None
    return sorted(out), min(state.blacklist.hosts[host].until for host in out)


def _until_a_host_returns(turn: Turn) -> float:
    """Seconds for which a new slot job would only find blacklisted hosts."""
    found = all_blacklisted(turn) if turn.state.blacklist else None
    if found is None or found[1] == float("inf"):
        return 0.0
    return max(0.0, found[1] - turn.now - PARKED_FOR)
