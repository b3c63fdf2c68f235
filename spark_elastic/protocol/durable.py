"""What outlives all workers: checkpoints that count, and when a world may begin from one (R18).

Nobody of the old world may be training on when another begins without any of its members: whoever was given up and
may be alive is waited for, until its end is seen or it has ended itself for want of the driver (R12).
"""

from __future__ import annotations

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import PublishCheckpoint
from spark_elastic.protocol.driver_state import Turn
from spark_elastic.protocol.registry import WorkerRecord
from spark_elastic.protocol.types import Checkpoint, SlotId, WorkerId

MARGIN = 5.0  # seconds beyond driver_timeout: of clocks, and of a last step


def checkpoint_written(turn: Turn, event: on.CheckpointWritten) -> None:
    """One of this attempt that is further than all that count; others came late and change nothing."""
    state, new = turn.state, event.checkpoint
    of_this_run = new.fence.attempt == state.attempt and new.fence.generation <= state.generation
    if not of_this_run or (state.checkpoints and not _further(new, state.checkpoints[0])):
        return
    state.checkpoints = (new, *state.checkpoints)[: state.limits.checkpoints_kept]
    turn.say(PublishCheckpoint(f"checkpoint {new.name} counts", state.checkpoints))


def _further(new: Checkpoint, old: Checkpoint) -> bool:
    return (new.fence, new.position) > (old.fence, old.position)


def given_up(turn: Turn, worker: WorkerRecord) -> None:
    """A member that may be alive."""
    if worker.rank is not None:
        until = turn.now + turn.state.limits.driver_timeout + MARGIN
        turn.state.unsure = turn.state.unsure.put(worker.worker, until)
        turn.state.unsure_in |= {_job(worker.slot)}


def seen_dead(turn: Turn, worker: WorkerId) -> None:
    turn.state.unsure = turn.state.unsure.drop(worker)


def slot_seen_dead(turn: Turn, slot: SlotId) -> None:
    """And so is whatever ran in it."""
    if _job(slot) not in turn.state.unsure_in:
        return
    for worker in tuple(turn.state.unsure):
        if worker.rpartition(".")[0] == slot:
            seen_dead(turn, worker)


def job_seen_dead(turn: Turn, job: int) -> None:
    """And so are all its attempts, those that were told to end before among them."""
    if str(job) not in turn.state.unsure_in:
        return
    turn.state.unsure_in -= {str(job)}
    for worker in tuple(turn.state.unsure):
        if _job(worker) == str(job):
            seen_dead(turn, worker)


def _job(name: SlotId | WorkerId) -> str:
    return name.partition("-")[0]


def old_members_may_live(turn: Turn) -> bool:
    return any(until > turn.now for until in turn.state.unsure.values())
