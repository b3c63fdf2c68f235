"""A worker's decisions: `step(state, event) -> (state, commands)`, pure; the same in a real process and in simulation.

A worker asks for a world, forms its group, takes the state where it must, trains, and asks again when the group
broke or a boundary was agreed. Two threads post: what an event of the past brings too late is answered with nothing,
or, where the main thread waits for an answer, with the question asked again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import (
    AbortGroup,
    CloseGroup,
    Exit,
    Form,
    Join,
    ReportDone,
    ReportFailure,
    Run,
    Sync,
    WorkerCommand,
)
from spark_elastic.protocol.types import (
    DRIVER_SILENT_EXIT_CODE,
    START,
    Fence,
    Position,
    SlotId,
    WorkerId,
    World,
)


class Stage(Enum):
    STARTING = "starting"
    JOINING = "joining"  # asked for a world
    FORMING = "forming"
    SYNCING = "syncing"
    RUNNING = "running"
    DONE = "done"  # reported its result, waits
    STOPPED = "stopped"


@dataclass(frozen=True)
class WorkerState:
    """fence: of the last world that it took. position: of the state that it holds (R5: an old one until a new one is
    swapped in whole); None while it holds none. aborted: newest world that is known to be over. open: whether the group
    of `fence` was not closed yet. code: of its exit."""

    worker: WorkerId
    slot: SlotId
    stage: Stage = Stage.STARTING
    fence: Fence | None = None
    world: World | None = None
    position: Position | None = None
    aborted: Fence | None = None
    open: bool = False
    result: str = ""
    code: int = 0


Answer: TypeAlias = tuple[WorkerState, tuple[WorkerCommand, ...]]


def initial(worker: WorkerId, slot: SlotId) -> Answer:
    """A process that was just started; it does nothing before it is warm."""
    return WorkerState(worker, slot), ()


def step(state: WorkerState, event: on.WorkerEvent) -> Answer:
    """What follows from an event."""
    if state.stage is Stage.STOPPED:
        return state, (Exit("it was told to end", state.code),)
    match event:
        case on.Warm():
            return _join(state, "warm") if state.stage is Stage.STARTING else (state, ())
        case on.WorldReceived():
            return _got_world(state, event.world)
        case on.GroupFormed() | on.Synced() | on.Applied() | on.Boundary() | on.GroupBroken() | on.Finished():
            return _in_world(state, event) if event.fence == state.fence else (state, ())
        case on.AbortReceived():
            return _abort_heard(state, event)
        case on.UserRaised():
            return _user_raised(state, event)
        case on.StopReceived():
            return _stop(state, event.reason, 0)
        case on.DriverSilent():
            return _stop(
                state, f"the driver has been silent for {event.seconds:.0f} s", DRIVER_SILENT_EXIT_CODE
            )


def _join(
    state: WorkerState, reason: str, suspects: tuple[WorkerId, ...] = (), planned: bool = False
) -> Answer:
    return replace(state, stage=Stage.JOINING), (
        Join(reason, state.fence, state.position, suspects, planned),
    )


def _got_world(state: WorkerState, world: World) -> Answer:
    if state.stage not in (Stage.JOINING, Stage.DONE):
        return state, ()
    if state.fence is not None and world.fence <= state.fence:
        if state.stage is Stage.DONE:
            return state, (_report_done(state),)
        return _join(state, f"world {world.fence.generation} is one that it left")
    me = world.member(state.worker)
    if me is None:
        return _stop(state, f"world {world.fence.generation} was formed without it", 0)
    number = world.fence.generation
    closing = _closing(state, f"world {number} follows")
    entered = replace(state, stage=Stage.FORMING, fence=world.fence, world=world, open=False)
    if _is_over(entered):
        after, commands = _join(entered, f"world {number} was over before it was heard of")
    elif me.position != state.position:
        # A late message misled the driver. Who trained on from here would break P1: this world must not begin.
        after, commands = _join(entered, f"world {number} was formed for a position that it does not hold")
    else:
        after = replace(entered, open=True)
        commands = (Form(f"rank {me.rank} of {world.size}: {world.reason}", world),)
    return after, (*closing, *commands)


def _in_world(state: WorkerState, event: on.WorkerEvent) -> Answer:
    """Events of the current world's own work."""
    match event:
        case on.GroupFormed() if state.stage is Stage.FORMING:
            return _formed(state)
        case on.Synced() if state.stage is Stage.SYNCING:
            return _run(replace(state, position=event.position or state.position))
        case on.Applied() if state.stage is Stage.RUNNING:
            return replace(state, position=event.position), ()
        case on.Boundary() if state.stage is Stage.RUNNING:
            # The group stays open until the next world is there: a slower peer may still read this step's last bytes.
            return _join(state, event.reason, planned=True)
        case on.GroupBroken() if state.stage in (Stage.FORMING, Stage.SYNCING, Stage.RUNNING):
            assert state.world is not None
            members = state.world.members
            suspects = tuple(members[rank].worker for rank in event.suspects if 0 <= rank < len(members))
            return _leave(state, event.reason, suspects)
        case on.Finished() if state.stage is Stage.RUNNING:
            done = replace(state, stage=Stage.DONE, result=event.result)
            return done, (_report_done(done),)
        case _:
            return state, ()


def _formed(state: WorkerState) -> Answer:
    world = state.world
    assert world is not None
    if _is_over(state):
        return _leave(state, f"world {world.fence.generation} was over before it was formed")
    if not world.receivers:
        return _run(state)
    verb = "take" if _rank(state) in world.receivers else "hand on"
    return replace(state, stage=Stage.SYNCING), (Sync(f"{verb} the state of rank {world.source}", world),)


def _run(state: WorkerState) -> Answer:
    """Train on. Where all begin from nothing, each holds the initial state from here on."""
    world = state.world
    assert world is not None
    if _is_over(state):
        return _leave(state, f"world {world.fence.generation} is over")
    position = START if world.source is None else state.position
    running = replace(state, stage=Stage.RUNNING, position=position)
    return running, (Run(f"rank {_rank(state)} of {world.size}", world, state.position),)


def _leave(state: WorkerState, reason: str, suspects: tuple[WorkerId, ...] = ()) -> Answer:
    joined, commands = _join(replace(state, open=False), reason, suspects)
    return joined, (*_closing(state, reason), *commands)


def _closing(state: WorkerState, reason: str) -> tuple[CloseGroup, ...]:
    """The command that closes the group, where one is open."""
    return (CloseGroup(reason, state.fence),) if state.open and state.fence is not None else ()


def _report_done(state: WorkerState) -> ReportDone:
    assert state.fence is not None
    return ReportDone("the end of training", state.fence, state.position or START, state.result)


def _abort_heard(state: WorkerState, event: on.AbortReceived) -> Answer:
    """R10: an older one is ignored; a newer one is kept for the world that it speaks of."""
    if state.fence is not None and event.fence < state.fence:
        return state, ()
    known = event.fence if state.aborted is None else max(state.aborted, event.fence)
    over = replace(state, aborted=known)
    if event.fence != state.fence or not state.open:
        return over, ()
    return over, (AbortGroup(event.reason, event.fence),)


def _user_raised(state: WorkerState, event: on.UserRaised) -> Answer:
    """R13: told to the driver before the group closes, so that peers' broken connections are never the first news."""
    reason = "user code raised"
    report = ReportFailure(reason, state.fence, state.position, event.fingerprint, event.traceback)
    stopped = replace(state, stage=Stage.STOPPED, code=1, open=False)
    return stopped, (report, *_closing(state, reason), Exit(reason, 1))


def _stop(state: WorkerState, reason: str, code: int) -> Answer:
    stopped = replace(state, stage=Stage.STOPPED, code=code)
    if state.open and state.fence is not None:
        return stopped, (AbortGroup(reason, state.fence), Exit(reason, code))
    return stopped, (Exit(reason, code),)


def _is_over(state: WorkerState) -> bool:
    return state.aborted is not None and state.fence is not None and state.fence <= state.aborted


def _rank(state: WorkerState) -> int:
    assert state.world is not None
    member = state.world.member(state.worker)
    assert member is not None
    return member.rank
