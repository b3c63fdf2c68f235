"""Failures that are the workers' own: what they cost their slot and the job, and when another try is no use.

R13 (deterministic failures): the same failure at the same position in two worlds ends the job. Everything else counts
against `failure_budget`, within a sliding window. Losses with an external cause are no failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from spark_elastic.protocol import commands as do
from spark_elastic.protocol.driver.failure_detector import evict_externally_lost
from spark_elastic.protocol.driver.slots import PARKING_LIMIT, give_back
from spark_elastic.protocol.driver.state import (
    DriverState,
    JobStage,
    Transition,
    WorkerFailure,
    WorkerRecord,
    add_time,
)
from spark_elastic.protocol.messages import WorkerExited
from spark_elastic.protocol.types import (
    DRIVER_SILENT_EXIT_CODE,
    KILLED_EXIT_CODES,
    START,
    Checkpoint,
    HostId,
    Position,
    SlotId,
    WorkerId,
    format_position,
)

MAX_OOM_KILLS = 2  # kills because memory ran out that a job tolerates within the failure window
MIN_TRIES = 2  # worlds, or workers of a slot, that must crash at one place to end the job
MAX_WORLDS_WITHOUT_PROGRESS = 2  # worlds in a row without progress that a job tolerates
MAX_KILLS_PER_SLOT = 20  # kills within the failure window that count as losses, not as failures
# Kills of one slot's workers in a row, before they took part in a world, that count as losses.
MAX_KILLS_IN_A_ROW = 2
# With which the worker, not the user's function, ends its process.
WORKER_EXIT_CODES = (1, DRIVER_SILENT_EXIT_CODE)


def record_failure(tx: Transition, failure: WorkerFailure, slot_at_fault: bool = True) -> None:
    """Count a failure. It ends the job if it is deterministic or exceeds the budget; a slot at fault cools down.
    Failures of excluded slots do not count, nor any after the job's result: R15 (end)."""
    state = tx.state
    name = failure.worker.slot
    if name in state.slots.excluded or state.timers.done_since is not None:
        return
    _count(tx, failure)
    slot = state.slots.get(name)
    if slot_at_fault and slot is not None and state.stage is not JobStage.ENDED:
        record_slot_failure(tx, slot.slot, slot.host)


def record_exit(tx: Transition, event: WorkerExited, took_part: bool, alive: bool, detail: str) -> None:
    """Count the end of a process. alive: the worker was on the records until now. A process that was killed, or ended
    itself under R12 (driver silence), is a loss like that of a host. Its slot is not to blame, unless its workers end
    so one after the other before they ever take part in a world, or again and again within the failure window."""
    state = tx.state
    slot = event.worker.slot
    if slot in state.slots.excluded or state.timers.done_since is not None:  # R15 (end)
        return
    window = state.limits.failure_window
    if event.out_of_memory:
        _record_oom_kill(tx, detail)
    elif event.exit_code in KILLED_EXIT_CODES:
        in_a_row, recent = state.failures.add_kill(slot, took_part, tx.now, window)
        if in_a_row > MAX_KILLS_IN_A_ROW:
            detail += f"; {in_a_row} of its slot ended so in a row before they took part in a world"
        elif recent > MAX_KILLS_PER_SLOT:
            detail += f"; {recent} of its slot ended so within {window:g} s"
        else:
            return
    # The step is not known: failures in worlds that began at the same position count as failures at one place.
    position = state.world.start_position if state.world is not None else None
    crash = ""
    if event.crashed_at:
        detail = f"{detail} in {event.crashed_at}"
        if took_part or state.world is None:  # crashes of newcomers need not stop those who train
            crash = f"{event.reason} in {event.crashed_at}"
    # The function chose the code (`os._exit(5)`, or 0 before its end), which is like an exception.
    chosen = event.exit_code >= 0 and event.exit_code not in WORKER_EXIT_CODES
    is_exit = alive and took_part and state.limits.all_results and chosen
    fingerprint = f"exit code {event.exit_code}" if is_exit else ""
    host = state.slots[slot].host if slot in state.slots else ""
    where = state.generation, event.worker, position
    record_failure(tx, WorkerFailure(tx.now, *where, fingerprint, detail, crash, host, is_exit))


def _count(tx: Transition, failure: WorkerFailure) -> None:
    state, history = tx.state, tx.state.failures
    oldest = tx.now - state.limits.failure_window
    earlier = tuple(f for f in history.records if f.at >= oldest)
    history.records = (*earlier, failure)
    reason = _find_repeated_exception(state, earlier, failure) or _find_repeated_crash(state, failure)
    detail = failure.detail
    if not reason:
        reason, detail = _find_exception_of_all(state, failure)
    if reason:
        tx.end(do.JobOutcome.USER_ERROR, reason, detail)
        return
    affected = history.generations_with_losses
    if tx.has_survivors():
        affected |= {0}  # a program that raises before it joins costs those who train nothing
    counted = [f for f in history.records if not (f.fingerprint and f.generation in affected)]
    # All exceptions in one world may be consequences of the first, so they count once.
    count = len({f.generation if f.generation and f.fingerprint else f.worker for f in counted})
    if count > state.limits.failure_budget:
        tx.end(
            do.JobOutcome.FAILURE_BUDGET,
            f"workers failed {count} times within {state.limits.failure_window:g} s and the job tolerates "
            f"{state.limits.failure_budget} (failure_budget); the last was worker {failure.worker}",
            failure.detail,
        )


def _record_oom_kill(tx: Transition, detail: str) -> None:
    """Memory ran out. If another process took it, the next try may succeed; if not, a setting is wrong: the job
    ends."""
    window, history = tx.state.limits.failure_window, tx.state.failures
    history.oom_kills = add_time(history.oom_kills, tx.now, window)
    kills = len(history.oom_kills)
    if kills > MAX_OOM_KILLS:
        tx.end(
            do.JobOutcome.OUT_OF_MEMORY,
            f"workers ran out of memory {kills} times within {window:g} s; the "
            "training process is outside the JVM: raise spark.executor.memoryOverhead (or the container's memory), "
            "or lower batch_size or the number of slots per executor",
            detail,
        )


def record_slot_failure(tx: Transition, slot: SlotId, host: HostId) -> None:
    """Blacklist the slot, or its host, for a while: a worker of the slot failed by its own fault."""
    state = tx.state
    slots = state.slots.on_host(host)
    discovered = dict(state.hosts.discovered or ()).get(host, 0)
    count = max(len(slots), discovered)
    state.blacklist = state.blacklist.record_failure(slot, host, count, tx.now, state.limits)
    until = state.blacklist.find_host_return(host, tx.now)
    if until is None or until - tx.now <= PARKING_LIMIT:
        return
    for record in slots:
        worker = tx.find_worker(record)
        if worker is None or not worker.is_member:
            give_back(tx, record, f"host {host} is blacklisted for {until - tx.now:.1f} s")


# ---- R13 (deterministic failures)


def _find_repeated_exception(state: DriverState, earlier: Sequence[WorkerFailure], new: WorkerFailure) -> str:
    """Why this exception is the program's fault and not a host's; "" if that is not certain."""
    if not new.fingerprint:
        return ""
    if new.generation == 0:
        return _find_exception_on_all_slots(state)
    affected = state.failures.generations_with_losses
    for old in earlier:
        alike = old.fingerprint == new.fingerprint and (old.position or START) == (new.position or START)
        if not alike or old.generation in affected or not 0 < old.generation < new.generation:
            continue
        before, where = f"worker {old.worker} had", format_position(new.position)
        if new.is_exit:
            how = f"ended in world {new.generation} with {new.fingerprint}, as {before} in world {old.generation}"
            return f"worker {new.worker} {how}, both of which began at {where}"
        how = f"raised in world {new.generation} what {before} raised in world {old.generation}"
        return f"worker {new.worker} {how}, both at {where}"
    return ""


def _find_exception_on_all_slots(state: DriverState) -> str:
    """The sentence for a job whose workers have raised on every slot before any was warm; "" otherwise."""
    raised = [f for f in state.failures.records if f.generation == 0 and f.fingerprint]
    slots = {f.worker.slot for f in raised}
    if state.world is None and not state.workers.waiting and len(raised) > 1 and slots >= set(state.slots):
        return f"no worker could load the program: {len(raised)} tried on {len(slots)} slots and all raised"
    return ""


def _find_repeated_crash(state: DriverState, new: WorkerFailure) -> str:
    """Why the program's native code will crash again, "" if it need not: it did so at one place in two worlds, and of
    several hosts, one of which may be broken, on two. Before there is a world, each slot has to have seen it twice."""
    if not new.crash:
        return ""
    affected, position = state.failures.generations_with_losses, new.position or START
    same = (f for f in state.failures.records if f.crash == new.crash and f.generation not in affected)
    alike = [f for f in same if (f.position or START) == position]
    if len(alike) < MIN_TRIES:
        return ""
    if new.generation == 0:
        tried = Counter(f.worker.slot for f in alike)
        if state.workers.waiting or any(tried[slot] < MIN_TRIES for slot in state.slots):
            return ""
        where = f"before they were warm, on all {len(state.slots)} slots"
    else:
        worlds = {f.generation for f in alike}
        crashed_on = {f.host for f in alike if f.host}
        hosts = {member.host for member in state.world.members} if state.world is not None else set()
        if len(worlds) < MIN_TRIES or len(crashed_on) < min(MIN_TRIES, len(hosts)):
            return ""
        where = f"in {len(worlds)} worlds that began at {format_position(new.position)}"
    return f"{len(alike)} workers crashed {where}, all of them {new.crash}"


def _find_exception_of_all(state: DriverState, new: WorkerFailure) -> tuple[str, str]:
    """Reason and detail (the first one's: others may follow from it), where every member of the world has raised."""
    world = state.world
    if world is None or world.fence.generation != new.generation:
        return "", ""
    raised = [f for f in state.failures.records if f.fingerprint and f.generation == new.generation]
    if len({f.worker for f in raised}) < world.size:
        return "", ""
    first = raised[0]
    who = f"all {world.size} workers" if world.size > 1 else "the only worker"
    which = f", the first was {first.worker}" if world.size > 1 else ""
    how = f"ended with {first.fingerprint}" if first.is_exit else "raised an exception"
    return f"{who} of world {new.generation} {how}{which}, at {format_position(first.position)}", first.detail


def record_progress(tx: Transition, chosen: Collection[WorkerId], position: Position | None) -> str:
    """Count the world that is over if it made no progress. Returns why another world of these workers at that position
    would break, too, "" if it need not.

    A world made no progress if it broke, lost no member and came no further, or lost only members that did not come to
    the regroup: others did the same from the same state. An outage between peers looks like this, too, and is tolerated
    for as long as one of the driver is."""
    state, history, current = tx.state, tx.state.failures, tx.state.current
    world = current.world
    members = {member.worker for member in world.members} if world is not None else set()
    lost = members - set(chosen)
    same = members == set(chosen) or (position is not None and bool(lost) and lost <= current.late)
    stopped_as_planned = not current.break_reason
    if world is None or stopped_as_planned or not same or (world.position or START) != (position or START):
        history.worlds_without_progress, history.broken_links = 0, ()
        return ""
    history.worlds_without_progress += 1
    history.broken_links += current.broken_links
    if history.worlds_without_progress == 1:
        history.without_progress_since = tx.now
    few = history.worlds_without_progress <= MAX_WORLDS_WITHOUT_PROGRESS
    another_try = few or tx.now - history.without_progress_since < state.limits.driver_timeout
    known = state.blacklist.links.keys() & set(_find_machines(tx, current.broken_links))
    if another_try and not known:
        return ""
    how = "since one did not come back in time" if lost else "although no worker was lost"
    reason = current.break_reason
    reasons = [reason, *(stall for stall in current.stalled.values() if stall not in reason)]
    if current.stalled:
        reasons.append("where such work just takes long, raise collective_timeout above it")
    return (
        f"{history.worlds_without_progress} worlds in a row, up to world {state.generation}, broke at "
        f"{resume_point(state, position)} {how}, and another would too: {'; '.join(reasons)}"
    )


def leave_out(tx: Transition, chosen: Sequence[WorkerRecord], position: Position | None) -> bool:
    """Evict one of two members that could not reach each other in the worlds without progress.

    False, and nothing is done, if a member kept others waiting (no link is at fault, then), or none blames one on
    another machine, or fewer than `min_workers` would be left, or a member was left out at this position before, and
    this link is not known to be dead."""
    state, history, current = tx.state, tx.state.failures, tx.state.current
    links = Counter(_find_machines(tx, history.broken_links))
    if not links or current.stalled or current.late or len(chosen) <= state.limits.min_workers:
        return False
    # Peers that only heard of it blame one of the two as well, so that one's other links count no more often.
    known = state.blacklist.links
    dead_link = max(links, key=lambda link: (link in known, links[link], *sorted(link)))
    if history.left_out_at == (position or START) and dead_link not in known:
        return False
    blamed = Counter(chain(*history.broken_links))
    # Of two that are blamed equally, the later rank; never the only one with the newest state.
    newest = [worker for worker in chosen if worker.position == position]
    ends = [w for w in chosen if state.slots[w.slot].machine in dead_link and newest != [w]]
    left_out = max(ends, key=lambda worker: (blamed[worker.worker], worker.rank or 0))
    count = history.worlds_without_progress
    worlds = "a world" if count == 1 else f"{count} worlds in a row"
    where = f"in {worlds} at {resume_point(state, position)}: {current.break_reason}"
    reason = f"machines {' and '.join(sorted(dead_link))} could not reach each other, {where}"
    title = tx.describe(left_out)
    history.left_out_at = position or START
    state.blacklist = state.blacklist.record_dead_link(dead_link, tx.now, state.limits)
    evict_externally_lost(tx, left_out, reason, kill=True)
    current.break_reason = f"{title} is left out: {reason}"
    return True


def _find_machines(tx: Transition, links: Iterable[frozenset[WorkerId]]) -> list[frozenset[str]]:
    """The two machines of each link that has them, and whose ends are alive."""
    workers, slots = tx.state.workers, tx.state.slots
    alive = (link for link in links if all(name in workers for name in link))
    machines = [frozenset(slots[workers[name].slot].machine for name in link) for link in alive]
    return [pair for pair in machines if len(pair) > 1]


def resume_point(state: DriverState, position: Position | None, newest: Checkpoint | None = None) -> str:
    """Where a world begins if its source is at that position. newest: what it begins from where no source has one."""
    if position is None and newest is not None and newest.is_kept:
        return f"{format_position(newest.position)}, as a host's memory has kept it"
    if position is None and state.checkpoints:
        return f"checkpoint {state.checkpoints[0].name}"
    return format_position(position)
