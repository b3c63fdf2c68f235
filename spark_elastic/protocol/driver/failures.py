"""Failures that are the workers' own: the budget over a sliding window, the user's exception that ends the job, and
worlds that break in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable

from spark_elastic.protocol.commands import Outcome
from spark_elastic.protocol.driver.state import DriverState, Failure, Turn
from spark_elastic.protocol.types import START, Position, WorkerId

STARVED_BORNE = 2  # kills because memory ran out that a job tolerates within the failure window
TRIES = 2  # of worlds, or of a slot's workers, that crashed at one place
VAIN_BORNE = 2  # worlds in a row that broke in vain
Ending = Callable[[Turn, Outcome, str, str], None]


def blame(turn: Turn, failure: Failure, end: Ending) -> None:
    """Count a failure, and end the job where it is the user's (R13) or one too many.

    end: called with outcome, reason and detail.
    """
    state = turn.state
    oldest = turn.now - state.limits.failure_window
    earlier = tuple(f for f in state.failures if f.at >= oldest)
    state.failures = (*earlier, failure)
    poison = _poison(state, earlier, failure) or _crashes(state, failure)
    if poison:
        end(turn, Outcome.USER_ERROR, poison, failure.detail)
        return
    of_all, detail = _raised_by_all(state, failure)
    if of_all:
        end(turn, Outcome.USER_ERROR, of_all, detail)
        return
    bereft = state.bereft
    count = len({_once(f) for f in state.failures if not (f.fingerprint and f.generation in bereft)})
    if count > state.limits.failure_budget:
        end(
            turn,
            Outcome.FAILURE_BUDGET,
            f"workers failed {count} times within {state.limits.failure_window:g} s and the job bears "
            f"{state.limits.failure_budget} (failure_budget); the last was worker {failure.worker}",
            failure.detail,
        )


def starve(turn: Turn, detail: str, end: Ending) -> None:
    """A worker was killed because memory ran out. If another process took the memory, the next try may succeed; if it
    happens again and again, a setting is wrong, and the job ends."""
    state = turn.state
    oldest = turn.now - state.limits.failure_window
    state.starved = (*(at for at in state.starved if at >= oldest), turn.now)
    if len(state.starved) > STARVED_BORNE:
        end(
            turn,
            Outcome.OUT_OF_MEMORY,
            f"workers ran out of memory {len(state.starved)} times within {state.limits.failure_window:g} s; the "
            "training process is outside the JVM: raise spark.executor.memoryOverhead (or the container's memory), "
            "or lower batch_size or the number of slots per executor",
            detail,
        )


def _once(failure: Failure) -> Hashable:
    """The key by which failures count: what members of one world raise is one failure, since the others' exceptions may
    only tell of the first one's end."""
    return failure.generation if failure.generation and failure.fingerprint else failure.worker


def _poison(state: DriverState, earlier: tuple[Failure, ...], new: Failure) -> str:
    """Why the program and not a host must be to blame for this exception; "" if that is not certain."""
    if not new.fingerprint:
        return ""
    if new.generation == 0:
        return _before_any_world(state)
    bereft = state.bereft
    for old in earlier:
        if old.generation in bereft:
            continue
        alike = old.fingerprint == new.fingerprint and (old.position or START) == (new.position or START)
        if alike and 0 < old.generation < new.generation:
            return (
                f"worker {new.worker} raised in world {new.generation} what worker {old.worker} had raised in world "
                f"{old.generation}, both at {spell(new.position)}"
            )
    return ""


def _crashes(state: DriverState, new: Failure) -> str:
    """Why the program's native code will crash again, "" if it need not: it did so at one place in two worlds, and of
    several hosts, one of which may be broken, on two. Before there is a world, each slot has to have seen it twice."""
    if not new.crash:
        return ""
    bereft, begins_at = state.bereft, new.position or START
    alike = [
        f
        for f in state.failures
        if f.crash == new.crash and (f.position or START) == begins_at and f.generation not in bereft
    ]
    if len(alike) < TRIES:
        return ""
    if new.generation == 0:
        tried = Counter(f.worker.rpartition(".")[0] for f in alike)
        if state.waiting or any(tried[slot] < TRIES for slot in state.slots):
            return ""
        where = f"before they were warm, on all {len(state.slots)} slots"
    else:
        worlds = {f.generation for f in alike}
        seen_on = {f.host for f in alike if f.host}
        there = {member.host for member in state.world.members} if state.world is not None else set()
        if len(worlds) < TRIES or len(seen_on) < min(TRIES, len(there)):
            return ""
        where = f"in {len(worlds)} worlds that began at {spell(new.position)}"
    return f"{len(alike)} workers crashed {where}, all of them {new.crash}"


def _raised_by_all(state: DriverState, new: Failure) -> tuple[str, str]:
    """Reason and detail, where nobody of its world is left to go on; of the first one, from whose end the others'
    exceptions may follow."""
    world = state.world
    if world is None or world.fence.generation != new.generation:
        return "", ""
    raised = [f for f in state.failures if f.fingerprint and f.generation == new.generation]
    if len({f.worker for f in raised}) < world.size:
        return "", ""
    first = raised[0]
    who = f"all {world.size} workers" if world.size > 1 else "the only worker"
    which = f", the first was {first.worker}" if world.size > 1 else ""
    reason = f"{who} of world {new.generation} raised an exception{which}, at {spell(first.position)}"
    return reason, first.detail


def _before_any_world(state: DriverState) -> str:
    """Every slot's worker raises before it is warm, and none ever got warm."""
    raised = [f for f in state.failures if f.generation == 0 and f.fingerprint]
    slots = {f.worker.rpartition(".")[0] for f in raised}
    if state.world is None and not state.waiting and len(raised) > 1 and slots >= set(state.slots):
        return f"no worker could load the program: {len(raised)} tried on {len(slots)} slots and all raised"
    return ""


def in_vain(turn: Turn, chosen: Collection[WorkerId], position: Position | None) -> str:
    """Why another world of these workers at that position would break like those before it, "" if it need not.

    One that broke, lost nobody and came no further broke in vain; so did one that lost none but those who did not come
    to the regroup, since others did the same from the same state. An outage between peers looks like this, too, and is
    borne for as long as one of the driver is.
    """
    state = turn.state
    world = state.world
    members = {member.worker for member in world.members} if world is not None else set()
    lost = members - set(chosen)
    same = members == set(chosen) or (position is not None and bool(lost) and lost <= state.late)
    if (
        world is None
        or not state.because  # it stopped as planned
        or not same
        or (world.position or START) != (position or START)
    ):
        state.vain = 0
        return ""
    state.vain += 1
    if state.vain == 1:
        state.vain_since = turn.now
    if state.vain <= VAIN_BORNE or turn.now - state.vain_since < state.limits.driver_timeout:
        return ""
    how = "since one did not come back in time" if lost else "although nobody was lost"
    story = [state.because, *(stall for stall in state.stalled.values() if stall not in state.because)]
    if state.stalled:
        story.append("where such work just takes long, raise collective_timeout above it")
    return (
        f"{state.vain} worlds in a row, up to world {state.generation}, broke at {whence(state, position)} {how}, and "
        f"another would too: {'; '.join(story)}"
    )


def whence(state: DriverState, position: Position | None) -> str:
    """For sentences: where a world begins whose source stands at that position."""
    if position is None and state.checkpoints:
        return f"checkpoint {state.checkpoints[0].name}"
    return spell(position)


def spell(position: Position | None) -> str:
    """A position for sentences."""
    if position is None:
        return "the beginning"
    return f"epoch {position.epoch}, {position.phase.name.lower()}, step {position.step}"
