"""What outlives all workers: checkpoints that count, and when a world may begin from one (R18).

Nobody of the old world may be training on when another begins without any of its members: whoever was given up and
may be alive is waited for, until its end is seen or it has ended itself because the driver was silent (R12). That Spark
calls an executor lost is half of a proof: it may only have lost sight of it.
"""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import PublishCheckpoint
from spark_elastic.protocol.driver.state import SlotEnd, Turn, Unsure, WorkerRecord
from spark_elastic.protocol.types import Checkpoint, SlotId, WorkerId

MARGIN = 5.0  # seconds added to driver_timeout, for clocks that differ and for a last step


def checkpoint_written(turn: Turn, event: on.CheckpointWritten) -> None:
    """A checkpoint counts if it is of this attempt and further than all that count; others are too late."""
    state, new = turn.state, event.checkpoint
    of_this_run = new.fence.attempt == state.attempt and new.fence.generation <= state.generation
    if not of_this_run or (state.checkpoints and not _further(new, state.checkpoints[0])):
        return
    state.checkpoints = (new, *state.checkpoints)[: state.limits.checkpoints_kept]
    turn.say(PublishCheckpoint(f"checkpoint {new.name} counts", state.checkpoints))


def _further(new: Checkpoint, old: Checkpoint) -> bool:
    return (new.fence, new.position) > (old.fence, old.position)


def given_up(turn: Turn, worker: WorkerRecord, disowned: bool = False) -> None:
    """Note that a member which may be alive was given up. Called while it is still on the records."""
    if worker.rank is None:
        return
    state = turn.state
    slot = state.slots.get(worker.slot)
    heard = max(worker.heard, slot.heard if slot is not None else worker.heard)
    until = heard + state.limits.driver_timeout + MARGIN
    ends = (
        (worker.worker, state.cut.get(worker.worker)),
        (worker.slot, slot.cut if slot is not None else None),
    )
    hung_up = any(
        end is not None and name not in state.unclosed and _soon(turn, end, heard) for name, end in ends
    )
    _note(turn, worker.worker, Unsure(until, heard, hung_up, disowned))
    job = _job(worker.slot)
    state.unsure_of = state.unsure_of.put(job, (*state.unsure_of.get(job, ()), worker.worker))


def connection_ended(turn: Turn, event: on.ConnectionLost) -> None:
    """That of a slot or of a worker, who may have been given up, or will be."""
    state, name = turn.state, event.worker or event.slot
    state.unclosed = state.unclosed | {name} if event.reset else state.unclosed - {name}
    for worker, unsure in _unsure_behind(turn, event):
        hung_up = _soon(turn, turn.now, unsure.heard) and (unsure.hung_up or not event.reset)
        _note(turn, worker, replace(unsure, hung_up=hung_up))


def connection_back(turn: Turn, event: on.ConnectionBack) -> None:
    """It was no end."""
    for worker, unsure in _unsure_behind(turn, event):
        _note(turn, worker, replace(unsure, hung_up=False))


def _unsure_behind(turn: Turn, event: on.ConnectionLost | on.ConnectionBack) -> list[tuple[WorkerId, Unsure]]:
    """Whom a connection tells of: its worker, or whoever ran in its slot."""
    return [
        (name, unsure)
        for name, unsure in _unsure_of(turn, _job(event.slot))
        if name == event.worker or (event.worker is None and _slot(name) == event.slot)
    ]


def _unsure_of(turn: Turn, job: str) -> list[tuple[WorkerId, Unsure]]:
    """Those of one slot job. Of ten thousand workers that were given up, most are of others."""
    unsure = turn.state.unsure
    return [(name, unsure[name]) for name in turn.state.unsure_of.get(job, ()) if name in unsure]


def seen_dead(turn: Turn, worker: WorkerId) -> None:
    turn.state.unsure = turn.state.unsure.drop(worker)


def slot_is_gone(turn: Turn, slot: SlotId, how: SlotEnd) -> None:
    """A slot is gone, and with it whatever ran in it, as far as `how` proves that."""
    for worker, unsure in _unsure_of(turn, _job(slot)):
        if _slot(worker) == slot:
            _testify(turn, worker, unsure, how)


def job_is_gone(turn: Turn, job: int, host_lost: bool) -> None:
    """A slot job is gone, and with it all its attempts, including those that were told to end before."""
    for worker, unsure in _unsure_of(turn, str(job)):
        gone = SlotEnd.DISOWNED if host_lost or unsure.disowned else SlotEnd.SEEN
        _testify(turn, worker, unsure, gone)
    if not _unsure_of(turn, str(job)):
        turn.state.unsure_of = turn.state.unsure_of.drop(str(job))


def _testify(turn: Turn, worker: WorkerId, unsure: Unsure, how: SlotEnd) -> None:
    if how is SlotEnd.SEEN:
        seen_dead(turn, worker)
    elif how is SlotEnd.DISOWNED:
        _note(turn, worker, replace(unsure, disowned=True))


def _note(turn: Turn, name: WorkerId, unsure: Unsure) -> None:
    """Spark's word alone does not prove that a member is dead, nor does a broken connection; both together do."""
    if unsure.hung_up and unsure.disowned:
        seen_dead(turn, name)
    else:
        turn.state.unsure = turn.state.unsure.put(name, unsure)


def _soon(turn: Turn, ended: float, heard: float) -> bool:
    """Whether the connection ended sooner than it would by the silence of a host that is cut off."""
    return ended - heard <= turn.state.limits.lease


def _slot(worker: WorkerId) -> SlotId:
    return worker.rpartition(".")[0]


def _job(name: SlotId | WorkerId) -> str:
    return name.partition("-")[0]


def old_members_may_live(turn: Turn) -> bool:
    return any(unsure.until > turn.now for unsure in turn.state.unsure.values())
