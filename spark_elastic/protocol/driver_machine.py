"""The driver's decisions: `step(state, event) -> (state, commands)`, pure.

A handler per kind of event (package `driver`) changes the records. Then `forming.decide_next_step` looks at the new
state and decides on worlds, announcements and the end. None of them knows clocks, sockets or Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages
from spark_elastic.protocol.driver import failure_detector, slots, workers
from spark_elastic.protocol.driver.forming import decide_next_step
from spark_elastic.protocol.driver.state import DriverState, JobStage, SlotLaunch, Transition
from spark_elastic.protocol.types import Checkpoint, Limits

__all__ = ["DriverState", "initial", "step"]


def initial(
    limits: Limits, attempt: int, checkpoints: tuple[Checkpoint, ...] = ()
) -> tuple[DriverState, tuple[do.DriverCommand, ...]]:
    """A job that begins, or continues from the first of `checkpoints`: ask for all the slots it may have."""
    tx = Transition(DriverState(limits, attempt, checkpoints=checkpoints), 0.0)
    for number in range(1, limits.max_workers + 1):
        slots.launch(tx, SlotLaunch(number), f"slot {number} of {limits.max_workers}")
    return tx.state, tuple(tx.commands)


def step(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, tuple[do.DriverCommand, ...]]:
    """What follows from an event. `state` itself is never changed."""
    tx = Transition(state, event.now, event.id)
    subject = event.message if isinstance(event, on.Received) else event
    if state.stage is JobStage.ENDED:
        _answer_after_end(tx, subject)
        return state, tuple(tx.commands)
    failure_detector.notice_pause(tx)
    if isinstance(event, on.Received):
        failure_detector.note_heard(tx)
        failure_detector.hear_possibly_alive(tx, event.message)
    HANDLERS[type(subject)](tx, subject)
    if tx.commands or not on.is_heartbeat(event):  # a mere heartbeat makes nothing due
        decide_next_step(tx)
        slots.carry_out_waiting_drains(tx)
    return tx.state, tuple(tx.commands)


def _on_checkpoint_written(tx: Transition, event: messages.CheckpointWritten) -> None:
    """R18 (publication): publish a checkpoint of this attempt that is further than all published ones."""
    state, new = tx.state, event.checkpoint
    of_this_attempt = new.fence.attempt == state.attempt and new.fence.generation <= state.generation
    newest = state.checkpoints[0] if state.checkpoints else None
    if not of_this_attempt or (newest and new.progress <= newest.progress):
        return
    kept = state.checkpoints_kept or state.limits.checkpoints_kept
    state.checkpoints = (new, *state.checkpoints)[:kept]
    tx.emit(do.PublishCheckpoint(f"checkpoint {new.name} is accepted", state.checkpoints))


def _on_checkpoint_store_full(tx: Transition, event: messages.CheckpointStoreFull) -> None:
    """Removes the oldest checkpoint and keeps one less from now on, but always the newest."""
    state = tx.state
    sender, number = state.newest_store_full or (event.worker, 0)
    if sender == event.worker and event.number <= number:
        return
    state.newest_store_full = event.worker, event.number
    if len(state.checkpoints) > 1:
        *kept, oldest = state.checkpoints
        state.checkpoints, state.checkpoints_kept = tuple(kept), len(kept)
        reason = f"the store is full: checkpoint {oldest.name} is removed for the next one"
        tx.emit(do.PublishCheckpoint(reason, state.checkpoints))


def _answer_after_end(tx: Transition, subject: messages.DriverMessage | on.DriverEvent) -> None:
    """The job is over: slots and workers that still ask are told to end."""
    match subject:
        case messages.RegisterSlot() | messages.Heartbeat() | messages.WorkerStarted():
            tx.emit(do.ReleaseSlot("the job has ended", subject.slot))
        case messages.RequestNextWorld() | messages.WorkerDone():
            tx.emit(do.StopWorker("the job has ended", subject.worker))


HANDLERS: dict[type[messages.DriverMessage | on.DriverEvent], Callable[[Transition, Any], None]] = {
    on.Tick: failure_detector.on_tick,
    messages.RegisterSlot: slots.on_slot_registered,
    messages.Heartbeat: workers.on_heartbeat,
    on.LaunchEnded: slots.on_launch_ended,
    on.HostAppeared: slots.on_host_appeared,
    on.HostLost: slots.on_host_lost,
    on.HostsDiscovered: slots.on_hosts_discovered,
    messages.WorkerStarted: workers.on_worker_started,
    messages.RequestNextWorld: workers.on_next_world_requested,
    messages.WorldFormed: workers.on_worker_formed,
    on.ConnectionLost: failure_detector.on_connection_lost,
    on.ConnectionBack: failure_detector.on_connection_back,
    messages.WorkerExited: workers.on_worker_exited,
    messages.WorkerRaised: workers.on_worker_raised,
    messages.WorkerDone: workers.on_worker_done,
    on.WorkerStalled: workers.on_worker_stalled,
    messages.CheckpointWritten: _on_checkpoint_written,
    messages.CheckpointStoreFull: _on_checkpoint_store_full,
    messages.WorkerStraggles: slots.on_worker_straggles,
    on.DrainRequested: slots.on_drain_requested,
    on.SlotsWanted: slots.on_slots_wanted,
    on.CancelRequested: lambda tx, event: tx.end(do.JobOutcome.CANCELLED, event.reason),
}
