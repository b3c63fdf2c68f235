"""Worlds: when the running one is to stop, and when the next one is published. Looked at after every event.

Level-triggered: only the present state counts, never which event led to it. So nothing is lost when two changes come
together.
"""

from __future__ import annotations

import math
from dataclasses import replace

from spark_elastic.protocol.commands import Announce, Outcome, Publish, StopWorker
from spark_elastic.protocol.driver.durable import old_members_may_live
from spark_elastic.protocol.driver.ending import end, finish, promptly
from spark_elastic.protocol.driver.evidence import break_world, lose, retire
from spark_elastic.protocol.driver.failures import in_vain, whence
from spark_elastic.protocol.driver.jobs import (
    all_blacklisted,
    give_back,
    launch_due,
    recall,
    release_idle,
)
from spark_elastic.protocol.driver.listing import look_at_barred
from spark_elastic.protocol.driver.membership import (
    Place,
    assign,
    capacity,
    compose,
    names,
    newest_position,
    source_of,
    wanted_at_start,
)
from spark_elastic.protocol.driver.state import DriverState, Gone, Leave, Stage, Turn, WorkerRecord
from spark_elastic.protocol.types import LAST_CHANGE, START, Fence, Position, SlotId, WorkerStatus, World

# `max_runtime`: a job that has had its time is stopped at the next step boundary. Pure.


GRACE = 60.0  # seconds for the way to the next boundary; some functions have none


def time_is_up(turn: Turn) -> str:
    """Why the job shall stop at its next boundary; "" while it has time."""
    state, limit = turn.state, turn.state.limits.max_runtime
    if state.began is None:
        state.began = turn.now
    if limit is None or turn.now - state.began < limit:
        return ""
    return f"the job has had its {limit:g} s (max_runtime)"


def is_told(turn: Turn) -> bool:
    """Whether the world's members were told that their next boundary is the job's last."""
    state = turn.state
    return state.world is not None and state.version >= state.world.version + LAST_CHANGE


def may_end(turn: Turn) -> bool:
    """Once its time is up: whether everybody has passed the last boundary, nobody is left to save anything, or the
    grace is over, too. A world that broke, or may have stopped for another change, is followed by one that is told.
    """
    state = turn.state
    assert state.began is not None
    assert state.limits.max_runtime is not None
    if turn.now - state.began >= state.limits.max_runtime + GRACE:
        return True
    if state.stage is Stage.RUNNING:
        return False
    told_only_that = state.world is not None and state.version == state.world.version + LAST_CHANGE
    return not turn.anybody_survives() or (told_only_that and not state.because)


# Whether a job has enough workers, and when it gives up waiting for them. Part of the driver machine; pure.


def enough(turn: Turn, count: int) -> bool:
    """Whether `count` workers are at least `min_workers`. Ends the job if there were too few for `start_timeout`."""
    state = turn.state
    if count >= state.limits.min_workers:
        state.short_since = None
        return True
    state.recall |= state.withheld > 0  # what was given back is needed now
    if state.short_since is None:
        state.short_since = turn.now
    elif turn.now - state.short_since >= state.limits.start_timeout:
        end(turn, Outcome.NOT_ENOUGH_WORKERS, _shortage(turn, count))
    else:
        _give_up_on_the_blacklisted(turn, state.short_since + state.limits.start_timeout)
    return False


def _give_up_on_the_blacklisted(turn: Turn, deadline: float) -> None:
    """Ends the job early if no host that is left could bring a worker before the deadline."""
    found = all_blacklisted(turn) if turn.state.blacklist else None
    if found is None or found[1] <= deadline:
        return
    hosts, first = found
    when = "never" if first == float("inf") else f"in {first - turn.now:.0f} s"
    end(
        turn,
        Outcome.NOT_ENOUGH_WORKERS,
        f"all hosts are blacklisted since their workers failed: {names(hosts)}; the first returns {when} "
        f"(cooldown_range), and the job waits for workers for {turn.state.limits.start_timeout:g} s (start_timeout)",
    )


def _shortage(turn: Turn, count: int) -> str:
    """The sentence with which such a job ends: who came, and what was still waited for."""
    state = turn.state
    hosts = sorted({slot.host for slot in state.slots.values()})
    silent = [str(job.job) for job in state.jobs.values() if job.slots == 0 and job.job not in state.put_off]
    starting = [turn.title(w) for w in state.workers.values() if w.status is WorkerStatus.STARTING]
    parts = [
        f"{count} workers came within {state.limits.start_timeout:g} s and {state.limits.min_workers} are needed "
        "(min_workers)",
        f"hosts: {names(hosts) or 'none'}",
    ]
    if silent:
        parts.append(f"waited for slot jobs that the cluster did not start: {names(silent)}")
    if starting:
        parts.append(f"waited for {names(starting)} to get warm")
    cooling = [
        f"{worker.worker} (its slot failed, for {until - turn.now:.0f} s)"
        for worker in state.workers.values()
        if (until := state.blacklist.slot_until(worker.slot, worker.host, turn.now)) is not None
    ]
    if cooling:
        parts.append(f"cooling down: {names(cooling)}")
    if state.yielded:
        parts.append(f"its slots were given back in between: {state.yielded}")
    if state.fruitless_end:
        parts.append(f"the last slot that ended before its worker was warm said: {state.fruitless_end}")
    return "; ".join(parts)


PATIENCE_WITH_THE_LAST = 10  # times regroup_timeout


def settle(turn: Turn) -> None:
    """Do whatever is due in the present state."""
    state = turn.state
    if state.stage is Stage.ENDED:
        return
    if state.done_since is not None:
        finish(turn)
        return
    if state.barred:
        look_at_barred(turn)
    if state.recall:
        recall(turn)
    if state.put_off:
        launch_due(turn)
    over_time = time_is_up(turn)
    if state.stage is Stage.RUNNING:
        _mind_running(turn, over_time)
    if over_time and may_end(turn):
        end(turn, Outcome.TIME_LIMIT, over_time)
        return
    if state.stage is Stage.REGROUPING:
        _regroup(turn)
    if state.stage is Stage.GATHERING:
        _gather(turn)


def _mind_running(turn: Turn, over_time: str) -> None:
    """A world is published: it has stopped as planned, is late with stopping or forming, or shall be asked to stop."""
    state = turn.state
    wait = GRACE if over_time else promptly(turn)  # a last checkpoint is written before they come
    if state.absent == 0:
        state.stage = Stage.REGROUPING
    elif state.regroup_since is not None:
        if turn.now - state.regroup_since >= wait:
            late = [worker.worker for worker in turn.survivors() if not worker.came]
            break_world(turn, f"{names(late)} did not come to the planned stop within {wait:g} s")
    elif state.unformed:
        if turn.now - state.published_at >= wait:
            late = [worker.worker for worker in turn.survivors() if not worker.formed]
            break_world(turn, f"{names(late)} did not build world {state.generation} within {wait:g} s")
    else:
        if state.waiting:
            release_idle(turn)
        _announce(turn, over_time)


def _announce(turn: Turn, over_time: str) -> None:
    """Ask the world to stop for a planned change, or because the job's time is up. Changes that come close together are
    announced as one (`debounce`)."""
    state = turn.state
    if state.results or (state.announced and not (over_time and not is_told(turn))):
        return
    if not over_time and (_resets_used_up(state) or not _change_possible(state)):
        state.change_since = None
        return
    if state.change_since is None:
        state.change_since = turn.now
    more_may_come = state.starting or state.draining or state.listed is not None or over_time
    if more_may_come and turn.now - state.change_since < state.limits.debounce:
        return  # what the next world would be is worth working out once, not at each of a thousand joins
    why = over_time or _change_wanted(turn)
    if not why:
        state.change_since = None
    else:
        state.version += LAST_CHANGE if over_time else 1
        state.announced = True
        turn.say(
            Announce(f"world {state.generation} shall stop at its next step boundary: {why}", state.version)
        )


def _change_possible(state: DriverState) -> bool:
    assert state.world is not None
    room = state.world.size < capacity(state.limits)
    return bool(state.draining or (room and state.waiting))


def _change_wanted(turn: Turn) -> str:
    """Who would join and leave if the next world were formed now; "" if nobody would."""
    state = turn.state
    # At a planned boundary all members stand at one position, whichever that will be.
    members = [replace(worker, position=START) for worker in turn.survivors()]
    chosen = {worker.worker for worker in compose(members, turn.newcomers(), state.limits)}
    now = {worker.worker for worker in members}
    if chosen == now:
        return ""
    return _difference(
        [worker.worker for worker in turn.newcomers() if worker.worker in chosen],
        [worker.worker for worker in members if worker.worker not in chosen],
    )


def _difference(joining: list[str], leaving: list[str]) -> str:
    joined = f"joining: {names(joining)}" if joining else ""
    left = f"leaving: {names(leaving)}" if leaving else ""
    return "; ".join(part for part in (joined, left) if part)


def _patience(turn: Turn) -> float:
    """Seconds to wait for a member that has not come back. It is far longer if nobody who came has a state (P3)."""
    kept = any(worker.came and worker.position is not None for worker in turn.survivors())
    return turn.state.limits.regroup_timeout * (1 if kept else PATIENCE_WITH_THE_LAST)


def _regroup(turn: Turn) -> None:
    """The world is over. The next one is formed once every member has come back or is lost."""
    state = turn.state
    if state.absent:
        waited = math.inf if state.regroup_since is None else turn.now - state.regroup_since
        if waited < state.limits.regroup_timeout:
            return  # what `_patience` says is worth working out once it counts, not as each of a thousand comes back
        wait = _patience(turn)
        if waited < wait:
            return
        for worker in turn.survivors():
            if not worker.came:
                state.late |= {worker.worker}
                reason = f"it did not come to the regroup within {wait:g} s (regroup_timeout)"
                lose(turn, worker, reason, kill=True)
    if not turn.anybody_survives():
        state.stage = Stage.GATHERING
        state.regroup_since = None
        begins = f"from checkpoint {state.checkpoints[0].name}" if state.checkpoints else "from nothing"
        state.because = (
            f"nobody of world {state.generation} is left, so training begins {begins}: {state.because}"
        )
        return
    most = len(state.workers) - state.starting
    if most < state.limits.min_workers and not enough(turn, most):
        return
    chosen = compose(turn.survivors(), turn.newcomers(), state.limits)
    if enough(turn, len(chosen)) and not _would_not_try_again(turn, len(chosen)):
        _publish(turn, chosen)


def _would_not_try_again(turn: Turn, size: int) -> bool:
    """R15: a rank of a job that needs all results has failed by its own fault, and the next world would end well
    without that rank. Its slot's next worker is waited for, for a while, so that a failure of the program shows itself
    (R13). In the middle of an elastic training nobody waits: there is more to come."""
    state = turn.state
    assert state.world is not None
    if not state.limits.all_results or size >= min(state.world.size, capacity(state.limits)):
        return False
    survivors = turn.survivors()
    returned = any(worker.status is WorkerStatus.SUCCESS for worker in survivors)
    if not returned and (newest_position(survivors) or START) != START:
        return False
    since = state.regroup_since if state.regroup_since is not None else turn.now
    until = since + min(state.limits.gather_timeout, promptly(turn))
    failed = {f.worker.rpartition(".")[0] for f in state.failures if f.generation == state.generation}
    return turn.now < until and any(_returns(turn, slot, until) for slot in failed)


def _returns(turn: Turn, name: SlotId, until: float) -> bool:
    """Whether the slot lives and is out of its cooldown by then, so that its worker could be in the next world."""
    slot = turn.state.slots.get(name)
    if slot is None:
        return False
    cools = turn.state.blacklist.slot_until(slot.slot, slot.host, turn.now)
    return cools is None or cools <= until


def _gather(turn: Turn) -> None:
    """R16: a first world at `num_workers`, or at `min_workers` once `gather_timeout` has passed since the first."""
    state = turn.state
    count = turn.count_newcomers()
    if count == 0:
        state.gather_since = None
    elif state.gather_since is None:
        state.gather_since = turn.now
    if not enough(turn, count) or old_members_may_live(turn):
        return
    assert state.gather_since is not None
    waited = turn.now - state.gather_since
    if count >= wanted_at_start(state.limits) or waited >= state.limits.gather_timeout:
        _publish(turn, turn.newcomers()[: capacity(state.limits)])


def _resets_used_up(state: DriverState) -> bool:
    """What would need another world ends the job, so no change is planned any more."""
    limit = state.limits.reset_limit
    return limit is not None and state.generation > limit


def _publish(turn: Turn, chosen: list[WorkerRecord]) -> None:
    state = turn.state
    if _resets_used_up(state):
        formed = (
            f"{state.generation - 1} were formed after the first (reset_limit {state.limits.reset_limit})"
        )
        end(turn, Outcome.RESET_LIMIT, f"a new world is needed and {formed}: {state.because}")
        return
    picked = {worker.worker for worker in chosen}
    dropped = [worker for worker in turn.survivors() if worker.worker not in picked]
    places = [Place(worker.worker, worker.slot, worker.host, worker.position) for worker in chosen]
    source = source_of(places)
    position = None if source is None else chosen[source].position
    vain = in_vain(turn, picked, position)
    if vain:
        end(turn, Outcome.USER_ERROR, vain)
        return
    state.generation += 1
    reason = _reason(turn, chosen, dropped, position)
    resume = state.checkpoints if source is None else ()
    fence = Fence(state.attempt, state.generation)
    world = World(fence, assign(places), 0 if resume else source, reason, state.version, resume)
    turn.say(Publish(reason, world))
    for worker in dropped:
        _dismiss(turn, worker)
    _enter(turn, world, chosen)


def _reason(
    turn: Turn, chosen: list[WorkerRecord], dropped: list[WorkerRecord], position: Position | None
) -> str:
    state = turn.state
    joining = [worker.worker for worker in chosen if worker.rank is None]
    change = _difference(joining, [worker.worker for worker in dropped])
    why = "; ".join(part for part in (state.because, change) if part)
    onward = whence(state, position)
    return (
        f"world {state.generation} of {len(chosen)} workers goes on from {onward}: {why or 'nothing changed'}"
    )


def _enter(turn: Turn, world: World, chosen: list[WorkerRecord]) -> None:
    """The records of a world that was just published."""
    state = turn.state
    for rank, worker in enumerate(chosen):
        turn.put(replace(worker, rank=rank, formed=False, came=False, status=WorkerStatus.JOINING))
        state.waiting = state.waiting.drop(worker.worker)
    state.stage = Stage.RUNNING
    state.world = world
    state.absent = state.unformed = len(chosen)
    state.suspected = state.late = frozenset()
    state.stalled = type(state.stalled)()
    state.results = type(state.results)()
    state.announced = False
    state.published_at = turn.now
    state.gather_since = state.regroup_since = state.change_since = state.short_since = None
    state.because = state.yielded = ""


def _dismiss(turn: Turn, worker: WorkerRecord) -> None:
    """A drained member, once the world without it is published."""
    reason = f"worker {worker.worker} leaves: {worker.draining}"
    retire(turn, worker, Gone(reason, WorkerStatus.SUCCESS))
    turn.say(StopWorker(reason, worker.worker))
    give_back(turn, turn.state.slots[worker.slot], reason, withhold=worker.leave is Leave.BY_HAND)
