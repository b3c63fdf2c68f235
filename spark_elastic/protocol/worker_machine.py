"""A worker's decisions: `step(state, event) -> (state, commands)`, pure; the same in a real process and in simulation.

A worker asks for a world, forms its group, takes the source's state if its own differs, trains, and asks again when the
group broke or a boundary was agreed. Two threads post events. An event of an earlier world has no effect, unless the
main thread waits for an answer: then the worker asks again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol.messages import RequestNextWorld, WorkerDone, WorkerRaised
from spark_elastic.protocol.types import DRIVER_SILENT_EXIT_CODE, START, Fence, Position, WorkerId, WorldView


class WorkerStage(Enum):
    STARTING = "starting"
    WAITING = "waiting"  # asked for a world
    FORMING = "forming"
    SYNCING = "syncing"
    RUNNING = "running"
    DONE = "done"  # reported its result, waits
    STOPPED = "stopped"


IN_WORLD = (WorkerStage.FORMING, WorkerStage.SYNCING, WorkerStage.RUNNING)


@dataclass(frozen=True)
class WorkerState:
    """What a worker knows of itself and its world. A process that was just started does nothing before it is warm."""

    worker: WorkerId  # its own id
    stage: WorkerStage = WorkerStage.STARTING  # what its main thread does
    fence: Fence | None = None  # of the last world that it entered
    world: WorldView | None = None  # that of `fence`; None before its first
    # Of the state that it holds, None while it holds none. R5 (staging): the old one until a new one is swapped in.
    position: Position | None = None
    newest_ended: Fence | None = None  # of the newest world that is known to be over
    open: bool = False  # the group of `fence` was not closed yet
    result: str = ""  # JSON text; "" until it has reached the end of training
    code: int = 0  # of its exit


StepResult: TypeAlias = tuple[WorkerState, tuple[do.WorkerCommand, ...]]


def step(state: WorkerState, event: on.WorkerEvent) -> StepResult:
    """What follows from an event."""
    if state.stage is WorkerStage.STOPPED:
        return state, (do.Exit("it was told to end", state.code),)
    match event:
        case on.Warm():
            return _ask_for_world(state, "warm") if state.stage is WorkerStage.STARTING else (state, ())
        case on.WorldReceived():
            return _receive_world(state, event.world)
        case on.AbortReceived():
            return _receive_abort(state, event)
        case on.UserRaised():
            return _report_exception(state, event)
        case on.StopReceived(reason=reason):
            return _stop(state, reason, 0)
        case on.DriverSilent(seconds=seconds):
            return _stop(state, f"the driver has been silent for {seconds:.0f} s", DRIVER_SILENT_EXIT_CODE)
        case _:
            return _handle_in_world(state, event) if event.fence == state.fence else (state, ())


def _ask_for_world(
    state: WorkerState, reason: str, suspects: tuple[int, ...] = (), planned: bool = False
) -> StepResult:
    request = RequestNextWorld(state.worker, state.fence, state.position, (), reason, planned, suspects)
    return replace(state, stage=WorkerStage.WAITING), (do.Ask(reason, request),)


def _receive_world(state: WorkerState, world: WorldView) -> StepResult:
    if state.stage not in (WorkerStage.WAITING, WorkerStage.DONE):
        return state, ()
    if state.fence is not None and world.fence <= state.fence:
        if state.stage is WorkerStage.DONE:
            return state, (_report_result(state),)
        return _ask_for_world(state, f"world {world.fence.generation} is one that it left")
    me = world.me
    if me.worker != state.worker:
        return _stop(state, f"world {world.fence.generation} was formed without it", 0)
    number = world.fence.generation
    closing = _close_commands(state, f"world {number} follows")
    entered = replace(state, stage=WorkerStage.FORMING, fence=world.fence, world=world, open=False)
    if _is_over(entered):
        after, commands = _ask_for_world(entered, f"world {number} was over before it came")
    elif me.position != state.position:
        # A late message misled the driver. To train on from here would break P1 (exactly once).
        why = f"world {number} was formed for a position that it does not hold"
        after, commands = _ask_for_world(entered, why)
    else:
        after = replace(entered, open=True)
        commands = (do.Form(f"rank {me.rank} of {world.size}", world),)
    return after, (*closing, *commands)


def _handle_in_world(state: WorkerState, event: on.WorldEvent) -> StepResult:
    """Events of the current world's own work."""
    match event:
        case on.GroupFormed() if state.stage is WorkerStage.FORMING:
            return _enter_formed(state)
        case on.Synced() if state.stage is WorkerStage.SYNCING:
            return _run(replace(state, position=event.position or state.position))
        case on.Applied() if state.stage is WorkerStage.RUNNING:
            return replace(state, position=event.position), ()
        case on.Boundary() if state.stage is WorkerStage.RUNNING:
            # The group stays open until the next world comes: a slower peer may still read this step's last bytes.
            return _ask_for_world(state, event.reason, planned=True)
        case on.GroupBroken() if state.stage in IN_WORLD:
            return _leave(state, event.reason, event.suspects)
        case on.Finished() if state.stage is WorkerStage.RUNNING:
            # A newcomer that took no state has a position from here on: the one that the driver is told.
            position = state.position or START
            done = replace(state, stage=WorkerStage.DONE, position=position, result=event.result)
            return done, (_report_result(done),)
        case _:
            return state, ()


def _enter_formed(state: WorkerState) -> StepResult:
    world = state.world
    assert world is not None
    if _is_over(state):
        return _leave(state, f"world {world.fence.generation} was over before it was formed")
    if not world.has_receivers:
        return _run(state)
    verb = "take" if world.receives else "hand on"
    sync = do.Sync(f"{verb} the state of rank {world.source}", world)
    return replace(state, stage=WorkerStage.SYNCING), (sync,)


def _run(state: WorkerState) -> StepResult:
    """Train on. If no member brought a state, each holds the initial state from here on."""
    world = state.world
    assert world is not None
    if _is_over(state):
        return _leave(state, f"world {world.fence.generation} is over")
    position = START if world.source is None else state.position
    running = replace(state, stage=WorkerStage.RUNNING, position=position)
    return running, (do.Run(f"rank {world.me.rank} of {world.size}", world, state.position),)


def _leave(state: WorkerState, reason: str, suspects: tuple[int, ...] = ()) -> StepResult:
    waiting, commands = _ask_for_world(replace(state, open=False), reason, suspects)
    return waiting, (*_close_commands(state, reason), *commands)


def _close_commands(state: WorkerState, reason: str) -> tuple[do.CloseGroup, ...]:
    """The command that closes the group, if one is open."""
    return (do.CloseGroup(reason, state.fence),) if state.open and state.fence is not None else ()


def _report_result(state: WorkerState) -> do.Ask:
    assert state.fence is not None
    assert state.position is not None
    done = WorkerDone(state.worker, state.fence, state.position, state.result)
    return do.Ask("the end of training", done)


def _receive_abort(state: WorkerState, event: on.AbortReceived) -> StepResult:
    """R10 (fence): an abort of an older world is ignored; one of a newer world waits for that world."""
    if state.fence is not None and event.fence < state.fence:
        return state, ()
    newest = event.fence if state.newest_ended is None else max(state.newest_ended, event.fence)
    updated = replace(state, newest_ended=newest)
    if event.fence != state.fence or not state.open:
        return updated, ()
    return updated, (do.AbortGroup(event.reason, event.fence),)


def _report_exception(state: WorkerState, event: on.UserRaised) -> StepResult:
    """R13 (deterministic failures): report before the group closes, so that the peers' broken connections come
    after."""
    reason = "user code raised"
    raised = WorkerRaised(state.worker, state.fence, state.position, event.fingerprint, event.traceback)
    stopped = replace(state, stage=WorkerStage.STOPPED, code=1, open=False)
    return stopped, (do.Report(reason, raised), *_close_commands(state, reason), do.Exit(reason, 1))


def _stop(state: WorkerState, reason: str, code: int) -> StepResult:
    stopped = replace(state, stage=WorkerStage.STOPPED, code=code)
    if state.open and state.fence is not None:
        return stopped, (do.AbortGroup(reason, state.fence), do.Exit(reason, code))
    return stopped, (do.Exit(reason, code),)


def _is_over(state: WorkerState) -> bool:
    ended = state.newest_ended
    return ended is not None and state.fence is not None and state.fence <= ended
