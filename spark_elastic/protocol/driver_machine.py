"""The driver's decisions: `step(state, event) -> (state, commands)`, pure.

Its parts are in the folder `driver`. Handlers (`slot_events`, `worker_events`) turn an event into records (`registry`)
and evidence (`evidence`, `failures`). Then `forming.settle` looks at the new state and decides on worlds, announcements
and the end. None of them knows clocks, sockets or Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import DriverCommand, Outcome, ReleaseSlot, StopWorker
from spark_elastic.protocol.driver import durable, jobs, listing, slot_events, stall, worker_events
from spark_elastic.protocol.driver.durable import connection_back, connection_ended
from spark_elastic.protocol.driver.ending import end
from spark_elastic.protocol.driver.evidence import hear, judge, mark_hiccup, notice_sleep, scan
from spark_elastic.protocol.driver.forming import settle
from spark_elastic.protocol.driver.state import DriverState, JobRecord, Stage, Turn
from spark_elastic.protocol.types import Checkpoint, Limits

__all__ = ["DriverState", "initial", "step"]


def initial(
    limits: Limits, attempt: int, checkpoints: tuple[Checkpoint, ...] = ()
) -> tuple[DriverState, tuple[DriverCommand, ...]]:
    """A job that begins, or goes on from the first of `checkpoints`: ask for all the slots it may have."""
    turn = Turn(DriverState(limits, attempt, checkpoints=checkpoints), 0.0)
    for number in range(1, limits.max_workers + 1):
        jobs.launch(turn, JobRecord(number), f"slot {number} of {limits.max_workers}")
    return turn.state, tuple(turn.commands)


def step(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, tuple[DriverCommand, ...]]:
    """What follows from an event. `state` itself is never changed."""
    turn = Turn(state, event.now)
    if state.stage is Stage.ENDED:
        _after_the_end(turn, event)
        return state, tuple(turn.commands)
    notice_sleep(turn)
    handler: Callable[[Turn, Any], None] = HANDLERS[type(event)]
    handler(turn, event)
    if not isinstance(event, on.SlotBeat) or turn.commands:  # a mere sign of life changes nothing
        settle(turn)
        listing.carry_out_early_orders(turn)
    return turn.state, tuple(turn.commands)


# ---- connections


def _connection_lost(turn: Turn, event: on.ConnectionLost) -> None:
    state = turn.state
    connection_ended(turn, event)
    slot = state.slots.get(event.slot)
    if event.worker is None:
        if slot is not None and slot.cut is None:
            turn.put_slot(replace(slot, cut=turn.now))
    elif event.worker in state.workers and event.worker not in state.cut:
        state.cut = state.cut.put(event.worker, turn.now)
        judge(turn, event.worker)
    mark_hiccup(turn)


def _connection_back(turn: Turn, event: on.ConnectionBack) -> None:
    state = turn.state
    mark_hiccup(turn)
    connection_back(turn, event)
    slot = state.slots.get(event.slot)
    worker = state.workers.get(event.worker) if event.worker is not None else None
    if worker is not None:
        hear(turn, worker)
    elif event.worker is None and slot is not None:
        turn.put_slot(replace(slot, cut=None, heard=turn.now))


# ---- orders from outside


def _slots_wanted(turn: Turn, event: on.SlotsWanted) -> None:
    """Slots that another job has are taken, not missing."""
    state = turn.state
    if not state.lacks_slots:
        return
    if not event.in_use:
        jobs.yield_slots(turn, event.reason)
    if state.short_since is not None:
        state.short_since = turn.now


def _cancel_requested(turn: Turn, event: on.CancelRequested) -> None:
    end(turn, Outcome.CANCELLED, event.reason)


def _tick(turn: Turn, event: on.Tick) -> None:
    scan(turn)


def _after_the_end(turn: Turn, event: on.DriverEvent) -> None:
    """The job is over: slots and workers that still ask are told to end."""
    match event:
        case on.SlotRegistered() | on.SlotBeat() | on.WorkerStarted():
            turn.say(ReleaseSlot("the job is over", event.slot))
        case on.WorkerJoins() | on.WorkerDone():
            turn.say(StopWorker("the job is over", event.worker))


HANDLERS: dict[type[on.DriverEvent], Callable[[Turn, Any], None]] = {
    on.Tick: _tick,
    on.SlotRegistered: slot_events.slot_registered,
    on.SlotBeat: slot_events.slot_beat,
    on.LaunchEnded: slot_events.slot_job_ended,
    on.HostAppeared: slot_events.host_appeared,
    on.HostLost: slot_events.host_lost,
    on.HostsDiscovered: listing.hosts_listed,
    on.WorkerStarted: worker_events.worker_started,
    on.WorkerJoins: worker_events.worker_joins,
    on.WorkerFormed: worker_events.worker_formed,
    on.ConnectionLost: _connection_lost,
    on.ConnectionBack: _connection_back,
    on.WorkerExited: worker_events.worker_exited,
    on.WorkerFailed: worker_events.worker_failed,
    on.WorkerDone: worker_events.worker_done,
    on.WorkerStalled: stall.worker_stalled,
    on.CheckpointWritten: durable.checkpoint_written,
    on.DrainRequested: listing.drain_requested,
    on.SlotsWanted: _slots_wanted,
    on.CancelRequested: _cancel_requested,
}
