"""Forms worlds: decides when the running world stops, which workers are in the next one, and when it is published.

    GATHERING   no world and no survivor of one: `_gather` publishes one when enough newcomers are warm
    RUNNING     `_check_running` announces planned changes; each member then leaves at the next step boundary
    REGROUPING  the world broke or stopped: `_regroup` publishes the next when every member has left it or is evicted

`decide_next_step` runs after every event. It is level-triggered: only the present state counts, never the event that
led to it, so two changes at the same time cannot hide each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from spark_elastic.protocol import commands as do
from spark_elastic.protocol.driver import failures, slots
from spark_elastic.protocol.driver.failure_detector import break_world, evict, remove_worker
from spark_elastic.protocol.driver.state import (
    DepartedWorker,
    DrainCause,
    DriverState,
    JobStage,
    Transition,
    WorkerRecord,
)
from spark_elastic.protocol.types import (
    START,
    Checkpoint,
    HostUpdateResult,
    Limits,
    Member,
    Position,
    WorkerId,
    WorkerStatus,
    World,
)

Records: TypeAlias = Sequence[WorkerRecord]
Machines: TypeAlias = Mapping[WorkerId, str]  # of each worker

# Seconds for the way to a job's last boundary under `max_runtime`; some functions have none.
LAST_STOP_TIMEOUT = 60.0
# Seconds to build a world, to come to a planned stop, or to report a result after rank 0's.
SHORT_TIMEOUT = 30.0
LAST_STATE_FACTOR = 10  # times regroup_timeout, while only a member that has not come back has a state
# Where a world begins whose workers are all new, if the job has written no checkpoint.
NO_CHECKPOINT = "the beginning, for lack of a checkpoint (a job with run_id and store writes them)"
MIN_OTHER_RELEASES = 3  # slots of another release that end a job with fewer slots
# Seconds from one world to the next for each world in a row without progress, and at most, since peers that refuse
# connections break worlds within milliseconds.
NO_PROGRESS_BACK_OFF, MAX_NO_PROGRESS_BACK_OFF = 0.5, 5.0


def decide_next_step(tx: Transition) -> None:
    """Take the next step that the present state allows: announce, publish a world, or end the job."""
    state = tx.state
    if state.stage is JobStage.ENDED:
        return
    if state.timers.done_since is not None:
        _finish(tx)
        return
    if state.slots.excluded:
        slots.admit_excluded(tx)
    if state.launches.relaunch:
        slots.relaunch(tx)
    if state.launches.delayed:
        slots.launch_due(tx)
    over_time = check_max_runtime(tx)
    if state.stage is JobStage.RUNNING:
        _check_running(tx, over_time)
    if over_time and _may_end(tx):
        tx.end(do.JobOutcome.TIME_LIMIT, over_time)
        return
    if state.stage is JobStage.REGROUPING:
        _regroup(tx)
    if state.stage is JobStage.GATHERING:
        _gather(tx)


def _get_short_timeout(tx: Transition) -> float:
    """Seconds for something that runs no user code."""
    return min(SHORT_TIMEOUT, tx.state.limits.regroup_timeout)


def _finish(tx: Transition) -> None:
    """R15 (end): end the job, which has the results that it needs. Other members get a moment to report theirs."""
    state = tx.state
    assert state.world is not None
    assert state.timers.done_since is not None
    if state.workers.not_left and tx.now - state.timers.done_since < _get_short_timeout(tx):
        return
    members, reported = state.world.members, state.current.results
    missing = [member.worker for member in members if member.worker not in reported]
    reason = f"all {len(members)} workers of world {state.generation} are done"
    if missing:
        reason = f"rank 0 of world {state.generation} is done; no result came from {format_names(missing)}"
    results = tuple(reported.get(member.worker, "null") for member in members)
    tx.end(do.JobOutcome.SUCCESS, reason, results=results)


def check_max_runtime(tx: Transition) -> str:
    """Why the job must stop at its next boundary; "" while it has time."""
    timers, limit = tx.state.timers, tx.state.limits.max_runtime
    if timers.began is None:
        timers.began = tx.now
    if limit is None or tx.now - timers.began < limit:
        return ""
    return f"the job has had its {limit:g} s (max_runtime)"


def _may_end(tx: Transition) -> bool:
    """Whether a job whose time is up can end: all members have passed the last boundary, or no survivor is left to save
    anything, or the time for that is over, too. After a world that broke or stopped for another change, one more world
    is formed, and the job's end is announced to it."""
    state = tx.state
    assert state.timers.began is not None
    assert state.limits.max_runtime is not None
    if tx.now - state.timers.began >= state.limits.max_runtime + LAST_STOP_TIMEOUT:
        return True
    if state.stage is JobStage.RUNNING:
        return False
    current, world = state.current, state.world
    only_end = world is not None and current.version == world.version.next(job_ends=True)
    stopped_for_end = current.end_announced and only_end and not current.break_reason
    return not tx.has_survivors() or stopped_for_end


# ---- a world that runs


def _check_running(tx: Transition, over_time: str) -> None:
    """Handle a published world: regroup if it has stopped, break it if it is late, announce a planned change."""
    state, timers = tx.state, tx.state.timers
    # Under max_runtime a last checkpoint is written before the members come.
    timeout = LAST_STOP_TIMEOUT if over_time else _get_short_timeout(tx)
    if state.workers.not_left == 0:
        state.stage = JobStage.REGROUPING
    elif timers.leaving_since is not None:
        if tx.now - timers.leaving_since >= timeout:
            late = format_names([w.worker for w in tx.list_survivors() if not w.has_left])
            break_world(tx, f"{late} did not come to the planned stop within {timeout:g} s")
    elif state.workers.unformed:
        if tx.now - timers.published_at >= timeout:
            late = format_names([w.worker for w in tx.list_survivors() if not w.formed])
            break_world(tx, f"{late} did not build world {state.generation} within {timeout:g} s")
    else:
        if state.workers.waiting:
            slots.release_idle(tx)
        _announce(tx, over_time)


def _announce(tx: Transition, over_time: str) -> None:
    """Ask the world to stop for a planned change (close ones are announced as one), or because the job's time is up."""
    state, current, timers = tx.state, tx.state.current, tx.state.timers
    if current.results or (current.announced and not (over_time and not current.end_announced)):
        return
    assert state.world is not None
    room = state.world.size < state.limits.capacity
    is_possible = state.workers.draining or (room and state.workers.waiting)
    if not over_time and (_resets_used_up(state) or not is_possible):
        timers.change_since = None
        return
    if timers.change_since is None:
        timers.change_since = tx.now
    more_may_come = state.workers.starting or state.workers.draining or state.hosts.discovered is not None
    if (more_may_come or over_time) and tx.now - timers.change_since < state.limits.debounce:
        return  # working out the next world is worth it once, not at each of a thousand requests
    joining, leaving = ([], []) if over_time else _find_change(tx)
    why = over_time or _format_change(joining, leaving)
    if not why:
        timers.change_since = None
        return
    update = HostUpdateResult.added if joining else HostUpdateResult.no_update
    update |= HostUpdateResult.removed if leaving else HostUpdateResult.no_update
    current.version = current.version.next(job_ends=bool(over_time), update=update)
    current.announced = True
    current.end_announced |= bool(over_time)
    reason = f"world {state.generation} is to stop at its next step boundary: {why}"
    tx.emit(do.AnnounceChange(reason, current.version))


def _find_change(tx: Transition) -> tuple[list[WorkerId], list[WorkerId]]:
    """Who would join and who would leave if the next world were formed now."""
    # At a planned boundary all members stand at one position, whichever that will be.
    members = [replace(worker, position=START) for worker in tx.list_survivors()]
    newcomers = tx.list_newcomers()
    chosen = {worker.worker for worker in choose_members(members, newcomers, tx.state.limits)}
    joining = [worker.worker for worker in newcomers if worker.worker in chosen]
    return joining, [worker.worker for worker in members if worker.worker not in chosen]


def _format_change(joining: Sequence[str], leaving: Sequence[str]) -> str:
    joined = f"joining: {format_names(joining)}" if joining else ""
    left = f"leaving: {format_names(leaving)}" if leaving else ""
    return "; ".join(part for part in (joined, left) if part)


# ---- between worlds


def _regroup(tx: Transition) -> None:
    """Publish the next world once every member of the old one has left it or is evicted."""
    state = tx.state
    if state.workers.not_left and not _evict_late_members(tx):
        return
    if not tx.has_survivors():
        state.stage = JobStage.GATHERING
        state.timers.leaving_since = None
        broke = state.current.break_reason
        state.current.break_reason = f"no worker of world {state.generation} is left: {broke}"
        return
    most = len(state.workers) - state.workers.starting
    if most < state.limits.min_workers and not _has_enough(tx, most):
        return
    back_off = min(MAX_NO_PROGRESS_BACK_OFF, NO_PROGRESS_BACK_OFF * state.failures.worlds_without_progress)
    if tx.now - state.timers.published_at < back_off:
        return
    chosen = choose_members(tx.list_survivors(), tx.list_newcomers(), state.limits)
    if _has_enough(tx, len(chosen)) and not _waits_for_failed_rank(tx, len(chosen)):
        _form_world(tx, chosen)


def _evict_late_members(tx: Transition) -> bool:
    """Evict members that do not leave the old world in time; False while the driver still waits for them."""
    state = tx.state
    since, timeout = state.timers.leaving_since, state.limits.regroup_timeout
    waited = math.inf if since is None else tx.now - since
    if waited < timeout:  # before the survivors are looked at: each of a thousand requests would do that
        return False
    if not any(worker.has_left and worker.position is not None for worker in tx.list_survivors()):
        timeout *= LAST_STATE_FACTOR  # P3 (no rollback): no member that came back has a state
    if waited < timeout:
        return False
    for worker in tx.list_survivors():
        if not worker.has_left:
            state.current.late |= {worker.worker}
            reason = f"it did not come to the regroup within {timeout:g} s (regroup_timeout)"
            evict(tx, worker, reason, kill=True)
    return True


def _waits_for_failed_rank(tx: Transition, size: int) -> bool:
    """Whether to wait for the next worker of a slot whose rank has failed by its own fault, in a job that needs all
    results: R15 (end). Without that rank the next world would succeed and hide a failure of the program: R13
    (deterministic failures). In the middle of an elastic training nothing waits, since a failure would come again."""
    state = tx.state
    assert state.world is not None
    if not state.limits.all_results or size >= min(state.world.size, state.limits.capacity):
        return False
    survivors = tx.list_survivors()
    returned = any(worker.status is WorkerStatus.SUCCESS for worker in survivors)
    if not returned and (slots.find_newest_position(survivors) or START) != START:
        return False
    since = state.timers.leaving_since if state.timers.leaving_since is not None else tx.now
    until = since + min(state.limits.gather_timeout, _get_short_timeout(tx))
    failed = {f.worker.slot for f in state.failures.records if f.generation == state.generation}
    alive = [state.slots[slot] for slot in failed if slot in state.slots]
    # When the cooldown of each ends, so that its worker could be in the next world.
    usable_at = [state.blacklist.find_slot_return(slot.slot, slot.host, tx.now) for slot in alive]
    return tx.now < until and any(at is None or at <= until for at in usable_at)


def _gather(tx: Transition) -> None:
    """R16 (start): publish the first world, of `num_workers`, or of `min_workers` once a newcomer has waited for
    `gather_timeout`. The same after the last member was lost, once none can still run: R18 (publication)."""
    state, timers = tx.state, tx.state.timers
    count = tx.count_newcomers()
    if count == 0:
        timers.gather_since = None
    elif timers.gather_since is None:
        timers.gather_since = tx.now
    if not _has_enough(tx, count):
        return
    if any(member.until > tx.now for member in state.possibly_alive.members.values()):
        return
    assert timers.gather_since is not None
    waited = tx.now - timers.gather_since
    if count >= state.limits.wanted_at_start or waited >= state.limits.gather_timeout:
        if count < state.limits.wanted_at_start and not state.generation:
            within = f"within {state.limits.gather_timeout:g} s (gather_timeout)"
            told = f"{count} of {state.limits.wanted_at_start} workers (num_workers) came {within}: the job begins"
            tx.emit(do.NotifyUser(f"{told} with them, others join once the cluster has cores for them"))
        _form_world(tx, tx.list_newcomers()[: state.limits.capacity])


# ---- too few workers


def _has_enough(tx: Transition, count: int) -> bool:
    """Whether `count` workers are at least `min_workers`. Ends the job if there were too few for `start_timeout`."""
    state, timers = tx.state, tx.state.timers
    launches, limits = state.launches, state.limits
    if count >= limits.min_workers:
        timers.too_few_since, timers.too_few_notified = None, False
        return True
    launches.relaunch |= launches.held_back_count > 0  # what was given back is needed now
    if timers.too_few_since is None:
        timers.too_few_since = tx.now
    waited = tx.now - timers.too_few_since
    # So many slots in a row could not register, since the driver does not understand them.
    foreign = not state.generation and launches.other_releases >= max(MIN_OTHER_RELEASES, len(launches))
    if waited >= limits.start_timeout:
        tx.end(do.JobOutcome.NOT_ENOUGH_WORKERS, _explain_missing_workers(tx, count))
    elif waited >= limits.gather_timeout and foreign:
        tx.end(
            do.JobOutcome.NOT_ENOUGH_WORKERS,
            f"the last {launches.other_releases} slots have another release of spark_elastic than the driver: "
            f"{launches.last_failure}",
        )
    else:
        if waited >= limits.gather_timeout and not timers.too_few_notified:
            timers.too_few_notified = True
            _notify_of_missing_workers(tx, count)
        _end_if_all_blacklisted(tx, timers.too_few_since + limits.start_timeout)
    return False


def _notify_of_missing_workers(tx: Transition, count: int) -> None:
    state, limits = tx.state, tx.state.limits
    starting = state.workers.starting
    advice = "give the application more cores, or lower min_workers"
    if count + starting >= limits.min_workers:
        advice = f"{starting} more have started and import what the program needs"
    elif state.launches.last_failure:
        advice = f"the last slot that ended before its worker was warm said: {state.launches.last_failure}"
    tx.emit(
        do.NotifyUser(
            f"{count} workers are there and {limits.min_workers} are needed (min_workers), in {len(state.slots)} slots "
            f"that the cluster has started: the job waits up to {limits.start_timeout:g} s (start_timeout); {advice}"
        )
    )


def _end_if_all_blacklisted(tx: Transition, deadline: float) -> None:
    """End the job early if no host that is left could bring a worker before the deadline."""
    found = slots.find_blacklisted_hosts(tx) if tx.state.blacklist else None
    if found is None or found[1] <= deadline:
        return
    hosts, first = found
    when = "never" if first == math.inf else f"in {first - tx.now:.0f} s"
    tx.end(
        do.JobOutcome.NOT_ENOUGH_WORKERS,
        f"all hosts are blacklisted since their workers failed: {format_names(hosts)}; the first returns {when} "
        f"(cooldown_range), and the job waits for workers for {tx.state.limits.start_timeout:g} s (start_timeout)",
    )


def _explain_missing_workers(tx: Transition, count: int) -> str:
    """The reason for which the job ends: how many workers came, and what the driver still waited for."""
    state, launches = tx.state, tx.state.launches
    hosts = sorted({slot.host for slot in state.slots.values()})
    silent = [str(n) for n, each in launches.items() if each.slots == 0 and n not in launches.delayed]
    starting = [tx.describe(w) for w in state.workers.values() if w.status is WorkerStatus.STARTING]
    advice = "lower num_workers or min_workers, give the application more cores, or raise start_timeout"
    if count + len(starting) >= state.limits.min_workers:
        advice = "those that have started still import, so raise start_timeout, or see why that takes long"
    cooling = [
        f"{worker.worker} (its slot failed, for {until - tx.now:.0f} s)"
        for worker in state.workers.values()
        if (until := state.blacklist.find_slot_return(worker.slot, worker.host, tx.now)) is not None
    ]
    parts = {
        "hosts": format_names(hosts) or "none",
        "waited for slot jobs that the cluster did not start": format_names(silent),
        "waited for workers to get warm": format_names(starting),
        "cooling down": format_names(cooling),
        "its slots were given back in between": launches.preempted,
        "the last slot that ended before its worker was warm said": launches.last_failure,
    }
    return "; ".join(
        [
            f"{count} workers came within {state.limits.start_timeout:g} s and {state.limits.min_workers} are needed "
            f"(min_workers), in {len(state.slots)} slots that the cluster has started: {advice}",
            *(f"{what}: {text}" for what, text in parts.items() if text),
        ]
    )


def format_names(names: Sequence[str], most: int = 8) -> str:
    """All of a few names, some of many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# ---- publishing a world


def _form_world(tx: Transition, chosen: list[WorkerRecord]) -> None:
    """Publish a world of these workers; if none is allowed, or would break again, leave one out or end the job."""
    state = tx.state
    if _resets_used_up(state):
        broke = state.current.break_reason
        if over_time := check_max_runtime(tx):
            tx.end(do.JobOutcome.TIME_LIMIT, f"{over_time}: {broke}")
            return
        count, limit = state.generation - 1, state.limits.reset_limit
        formed = f"{count} were formed after the first (reset_limit {limit})"
        tx.end(do.JobOutcome.RESET_LIMIT, f"a new world is needed and {formed}: {broke}")
        return
    position = slots.find_newest_position(chosen)
    why_end = failures.record_progress(tx, {worker.worker for worker in chosen}, position)
    if not why_end:
        _publish(tx, chosen, position)
    elif failures.leave_out(tx, chosen, position):
        _regroup(tx)
    else:
        tx.end(do.JobOutcome.USER_ERROR, why_end)


def _publish(tx: Transition, chosen: list[WorkerRecord], position: Position | None) -> None:
    state, current = tx.state, tx.state.current
    names = {worker.worker for worker in chosen}
    survivors = {worker.worker: worker for worker in tx.list_survivors()}
    leaving = [worker for worker in survivors.values() if worker.worker not in names]
    machines = {worker.worker: state.slots[worker.slot].machine for worker in chosen}
    staying = [worker for worker in chosen if worker.worker in survivors]
    joining = [worker for worker in chosen if worker.worker not in survivors]
    ranked = group_by_machine(staying, joining, machines)
    source = find_source(ranked)
    current.generation += 1
    resume, reader = ((), source) if source is not None else choose_resume(state, ranked)
    begins_anew = reader is None and not survivors and current.generation > 1
    point = NO_CHECKPOINT if begins_anew else failures.resume_point(state, position, *resume[:1])
    reason = _explain_world(tx, ranked, leaving, point)
    members = assign_ranks(ranked, machines)
    world = World(state.fence, members, reader, reason, current.version, resume)
    tx.emit(do.PublishWorld(reason, world))
    for worker in leaving:
        _dismiss(tx, worker)
    _enter(tx, world, ranked)


def _resets_used_up(state: DriverState) -> bool:
    """Whether another world would end the job, so that no change is planned any more."""
    limit = state.limits.reset_limit
    return limit is not None and state.generation > limit


def choose_resume(state: DriverState, ranked: Records) -> tuple[tuple[Checkpoint, ...], int | None]:
    """What a world without a state begins from: the published checkpoints, or before them the commit that a member's
    host keeps, if that is newer: R23 (kept commits). With it the rank that reads it; None: nothing is there."""
    published = state.checkpoints
    newest, reader = published[:1], 0 if published else None
    for rank, worker in enumerate(ranked):
        kept = state.slots[worker.slot].kept
        if kept is not None and (not newest or kept.progress > newest[0].progress):
            newest, reader = (kept,), rank
    return published if newest == published[:1] else (*newest, *published), reader


def _explain_world(tx: Transition, chosen: Records, leaving: Records, point: str) -> str:
    state = tx.state
    broke = state.current.break_reason
    joining = [worker.worker for worker in chosen if not worker.is_member]
    change = _format_change(joining, [worker.worker for worker in leaving])
    why = "; ".join(part for part in (broke, change) if part) or "nothing changed"
    size = f"{len(chosen)} worker{'' if len(chosen) == 1 else 's'}"
    sentence = f"world {state.generation}, of {size}, continues from {point}: {why}"
    return sentence if broke else tx.cite(sentence)


def _enter(tx: Transition, world: World, chosen: Records) -> None:
    state, timers = tx.state, tx.state.timers
    for rank, worker in enumerate(chosen):
        entered = replace(worker, rank=rank, formed=False, has_left=False, status=WorkerStatus.JOINING)
        state.workers.put(entered)
    state.stage = JobStage.RUNNING
    state.current.enter(world)
    timers.published_at = tx.now
    timers.gather_since = timers.leaving_since = timers.change_since = timers.too_few_since = None
    state.launches.preempted = ""


def _dismiss(tx: Transition, worker: WorkerRecord) -> None:
    """Release a drained member, once the world without it is published."""
    reason = f"worker {worker.worker} leaves: {worker.draining}"
    remove_worker(tx, worker, DepartedWorker(reason))
    tx.emit(do.StopWorker(reason, worker.worker))
    slot = tx.state.slots[worker.slot]
    if worker.drain_cause is DrainCause.STRAGGLER and not slot.straggled_before:
        # Its spare becomes a worker, which may do better.
        tx.state.slots.put(replace(slot, straggled_before=True))
        return
    if worker.drain_cause is DrainCause.STRAGGLER:
        # The next slot is to be on another host, if there is one.
        failures.record_slot_failure(tx, slot.slot, slot.host)
    slots.give_back(tx, slot, reason, hold_back=worker.drain_cause is DrainCause.BY_USER)


# ---- members and ranks


def choose_members(survivors: Records, newcomers: Records, limits: Limits) -> list[WorkerRecord]:
    """Members of the next world: survivors in rank order, R4 (survivors), then newcomers in order of arrival. A
    draining survivor stays a member only if it alone has the newest state, or if there were too few without it."""
    staying = [worker for worker in survivors if not worker.draining]
    leaving = [worker for worker in survivors if worker.draining]
    needed: list[WorkerRecord] = []
    newest = slots.find_newest_position(survivors)
    if newest != slots.find_newest_position(staying):
        needed = [next(worker for worker in leaving if worker.position == newest)]
    joining = list(newcomers[: max(0, limits.capacity - len(staying) - len(needed))])
    missing = limits.min_workers - len(staying) - len(needed) - len(joining)
    needed += [worker for worker in leaving if worker not in needed][: max(0, missing)]
    chosen = {worker.worker for worker in (*staying, *needed)}
    return [worker for worker in survivors if worker.worker in chosen] + joining


def group_by_machine(staying: Records, joining: Records, machines: Machines) -> list[WorkerRecord]:
    """The next world's members in order of rank. Survivors stay in their order, so that rank 0 is one of them; each
    newcomer comes behind the other members on its machine. Those on other machines come last, machine by machine."""
    last = {machines[worker.worker]: worker.worker for worker in staying}  # of each machine's survivors
    coming: dict[str, list[WorkerRecord]] = {}
    for worker in joining:
        coming.setdefault(machines[worker.worker], []).append(worker)
    ranked: list[WorkerRecord] = []
    for worker in staying:
        ranked.append(worker)
        machine = machines[worker.worker]
        if last[machine] == worker.worker:
            ranked += coming.pop(machine, ())
    return ranked + [worker for newcomers in coming.values() for worker in newcomers]


def assign_ranks(ranked: Records, machines: Machines) -> tuple[Member, ...]:
    """Members in the order given. Local ranks count a machine's members, on whichever of its hosts; cross ranks count,
    over the machines in order of their first member, the members with an equal local rank (Horovod's definition)."""
    on_machine: Counter[str] = Counter()
    local_ranks: list[int] = []
    for worker in ranked:
        local_ranks.append(on_machine[machines[worker.worker]])
        on_machine[machines[worker.worker]] += 1
    cross_ranks: dict[tuple[str, int], int] = {}  # by machine and local rank
    width: Counter[int] = Counter()  # local rank -> how many machines have it
    for machine, size in on_machine.items():
        cross_ranks.update({(machine, local): width[local] for local in range(size)})
        width.update(range(size))
    members = []
    for rank, (worker, local) in enumerate(zip(ranked, local_ranks, strict=True)):
        machine = machines[worker.worker]
        cross = cross_ranks[machine, local], width[local]
        place = rank, local, on_machine[machine], *cross
        members.append(Member(worker.worker, worker.slot, worker.host, *place, worker.position))
    return tuple(members)


def find_source(ranked: Records) -> int | None:
    """R4 (survivors): the lowest rank among those at the highest position; None if no worker has a state."""
    newest = slots.find_newest_position(ranked)
    return None if newest is None else [worker.position for worker in ranked].index(newest)
