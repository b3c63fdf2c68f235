"""How a job ends: everybody is told, then the caller. Part of the driver machine; pure."""

from __future__ import annotations

from spark_elastic.protocol.commands import End, Outcome, ReleaseSlot, StopWorker
from spark_elastic.protocol.driver.membership import names
from spark_elastic.protocol.driver.state import Stage, Turn

PROMPTLY = 30.0  # seconds to build a world, to come to a planned stop, to report a result after rank 0's


def end(turn: Turn, outcome: Outcome, reason: str, detail: str = "", results: tuple[str, ...] = ()) -> None:
    """The job is over: everybody is told, then the caller."""
    state = turn.state
    if state.stage is Stage.ENDED:
        return
    state.stage = Stage.ENDED
    for worker in state.workers.values():
        turn.say(StopWorker(f"the job is over ({outcome.value}): {reason}", worker.worker))
    for slot in state.slots.values():
        turn.say(ReleaseSlot(f"the job is over ({outcome.value}): {reason}", slot.slot))
    turn.say(End(reason, outcome, results, detail))


def finish(turn: Turn) -> None:
    """R15: the results that make the job a success are in. Other members that are about to finish get a moment to."""
    state = turn.state
    assert state.world is not None
    assert state.done_since is not None
    late = state.absent > 0
    if late and turn.now - state.done_since < promptly(turn):
        return
    members = state.world.members
    missing = [member.worker for member in members if member.worker not in state.results]
    reason = f"all {len(members)} workers of world {state.generation} are done"
    if missing:
        reason = f"rank 0 of world {state.generation} is done; no result came from {names(missing)}"
    results = tuple(state.results.get(member.worker, "null") for member in members)
    end(turn, Outcome.SUCCESS, reason, results=results)


def promptly(turn: Turn) -> float:
    """Seconds that something may take which runs no user code."""
    return min(PROMPTLY, turn.state.limits.regroup_timeout)
