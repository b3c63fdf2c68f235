"""Handlers of the driver machine for messages that concern workers: processes, requests for worlds, results, ends. One
`RequestNextWorld` ends a worker's part in a world and asks for the next one, which is the answer to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages
from spark_elastic.protocol.driver import failure_detector as detector
from spark_elastic.protocol.driver import failures, slots
from spark_elastic.protocol.driver.state import (
    DepartedWorker,
    JobStage,
    SlotRecord,
    Transition,
    WorkerFailure,
    WorkerRecord,
)
from spark_elastic.protocol.types import (
    KILLED_EXIT_CODES,
    NOT_RUNNING,
    Position,
    WorkerId,
    WorkerStatus,
    format_position,
)

# A slot is given back once so many of its workers were evicted for silence within the failure window.
MAX_SILENCES_PER_SLOT = 3


def on_heartbeat(tx: Transition, event: messages.Heartbeat) -> None:
    state = tx.state
    slot = state.slots.get(event.slot)
    if slot is None:
        slots.release_departed(tx, event.slot)
        return
    slot = detector.note_heartbeat(tx, slot, event)
    if event.worker is None:
        return
    departed = state.workers.departed.get(event.worker)
    if departed is not None:
        reason = f"worker {event.worker} is no longer part of the job: {departed.reason}"
        tx.emit(do.StopWorker(reason, event.worker, kill=not departed.reported_end))
    else:
        if event.worker not in state.workers:
            register_worker(tx, slot, event.worker)
        worker = state.workers.get(event.worker)
        if worker is not None and event.state not in NOT_RUNNING:
            state.workers.set_last_seen(worker, tx.now)


def _explain_silences(tx: Transition, slot: SlotRecord) -> str:
    count, window = len(tx.state.failures.silences.get(slot.slot, ())), tx.state.limits.failure_window
    if count < MAX_SILENCES_PER_SLOT:
        return ""
    return f"{count} workers of slot {slot.slot} were evicted within {window:g} s because they were silent"


def on_worker_started(tx: Transition, event: messages.WorkerStarted) -> None:
    state = tx.state
    slot = state.slots.get(event.slot)
    if slot is None:
        slots.release_departed(tx, event.slot)
    elif event.worker not in state.workers and event.worker not in state.workers.departed:
        kept = event.kept or slot.kept  # since it came, workers of the host have kept newer ones
        register_worker(tx, replace(slot, last_seen=tx.now, kept=kept), event.worker)
    elif event.worker in state.workers:
        # A new process, since its program begins again: R15 (end). The connection that broke was the old one's.
        detector.mark_reconnected(tx, state.workers[event.worker])


def register_worker(tx: Transition, slot: SlotRecord, name: WorkerId) -> None:
    """`name` is the slot's worker now; another that it had has ended."""
    state = tx.state
    previous = tx.find_worker(slot)
    if previous is not None and name.number < previous.worker.number:
        # This message was delayed, and the slot has another worker since.
        reason = f"its slot started worker {previous.worker} in its place"
        state.workers.record_departure(name, DepartedWorker(reason, exit_unreported=True))
        return
    if previous is not None:
        detector.evict(tx, previous, f"its slot started worker {name} in its place", exit_unreported=True)
    state.workers.put(WorkerRecord(name, slot.slot, slot.host, tx.now, extra=slot.extra))
    slot = replace(slot, worker=name)
    state.slots.put(slot)
    why = slots.explain_drain(tx, slot) or slots.explain_missing_discovery(tx, slot)
    if why:  # its member was about to leave, and was lost first
        slots.give_back(tx, slot, why)
    elif silences := _explain_silences(tx, slot):
        count = len(state.slots.on_host(slot.host))
        state.blacklist = state.blacklist.record_failure(slot.slot, slot.host, count, tx.now, state.limits)
        slots.give_back(tx, slot, silences)


# ---- requests for the next world


def on_next_world_requested(tx: Transition, event: messages.RequestNextWorld) -> None:
    worker = _find_or_stop_sender(tx, event)
    if worker is None:
        return
    worker = detector.mark_reconnected(tx, worker)
    if not worker.is_member:
        _admit_newcomer(tx, worker)
    elif event.fence == tx.state.fence:
        _leave_world(tx, worker, event)
    elif tx.state.stage is JobStage.REGROUPING:
        # It never received the world that it is a member of, and that world is over by now.
        _mark_left(tx, worker, event.position, WorkerStatus.READY)
    # Otherwise it has not received that world yet: the server answers its repeated request with it.


def _find_or_stop_sender(tx: Transition, event: messages.RequestNextWorld) -> WorkerRecord | None:
    """The record of the worker that asks. If it cannot take part, emit its `StopWorker` and return None."""
    state, name, fence = tx.state, event.worker, event.fence
    worker, departed = state.workers.get(name), state.workers.departed.get(name)
    slot = state.slots.get(event.slot)
    if departed is not None:
        why = f"is no longer part of the job: {departed.reason}"
    elif worker is None and slot is None:
        why = f"is of slot {event.slot}, which is not of this job"
    elif fence is not None and (worker is None or not worker.is_member or fence.attempt != state.attempt):
        why = f"comes from world {fence.generation}, in which it is no member"
    else:
        if worker is None and slot is not None:
            register_worker(tx, slot, name)
        return state.workers.get(name)
    tx.emit(do.StopWorker(f"worker {name} {why}", name))
    return None


def _admit_newcomer(tx: Transition, worker: WorkerRecord) -> None:
    """A warm worker asks for its first world."""
    state = tx.state
    if worker.arrival:
        return
    state.workers.arrivals += 1
    arrival = state.workers.arrivals
    state.workers.put(replace(worker, arrival=arrival, arrived_at=tx.now, status=WorkerStatus.WARM))
    slot = state.slots.get(worker.slot)
    if slot is not None:
        state.launches.update(slot.launch, got_warm=True)


def _describe_suspects(tx: Transition, suspects: Sequence[WorkerId]) -> Iterator[str]:
    """Their names, and which had returned: no fault of the network, but of a function that leaves the others alone."""
    workers = tx.state.workers
    for name in suspects:
        returned = name in workers and workers[name].status is WorkerStatus.SUCCESS
        yield f"{name} (which had returned its result)" if returned else name


def _leave_world(tx: Transition, worker: WorkerRecord, event: messages.RequestNextWorld) -> None:
    """A member has left its world and asks for the next one. If no change was announced, the world is broken."""
    timers = tx.state.timers
    _mark_left(tx, worker, event.position, WorkerStatus.READY)
    if timers.leaving_since is None:
        timers.leaving_since = tx.now
    if not event.planned and not worker.has_left:  # it asks again and again, and blames once
        blame = f" and blames {', '.join(_describe_suspects(tx, event.suspects))}" if event.suspects else ""
        reason = f"{tx.describe(worker)} could not continue{blame}: {event.reason or 'its group broke'}"
        detector.break_world(tx, reason, cause_unknown=True)
        detector.suspect(tx, event.worker, event.suspects)


def _mark_left(tx: Transition, worker: WorkerRecord, position: Position | None, status: WorkerStatus) -> None:
    """Record that a member has left the newest world at that position; a member with a result is recorded already."""
    if worker.worker not in tx.state.current.results:
        tx.state.workers.put(replace(worker, has_left=True, formed=True, position=position, status=status))


def on_worker_formed(tx: Transition, event: messages.WorldFormed) -> None:
    state = tx.state
    worker = state.workers.get(event.worker)
    if worker is None or not worker.is_member or worker.formed or event.fence != state.fence:
        return
    state.workers.put(replace(worker, formed=True, status=WorkerStatus.RUNNING, last_seen=tx.now))
    if state.blacklist:
        state.blacklist = state.blacklist.record_success(worker.slot, worker.host)
    state.failures.kills_in_a_row = state.failures.kills_in_a_row.drop(worker.slot)


def on_worker_stalled(tx: Transition, event: on.WorkerStalled) -> None:
    if event.fence == tx.state.fence and tx.state.stage in (JobStage.RUNNING, JobStage.REGROUPING):
        current = tx.state.current
        current.stalled = current.stalled.put(event.worker, event.text)


def on_worker_done(tx: Transition, event: messages.WorkerDone) -> None:
    """Record a member's result. With rank 0's (or with all, if the job needs all) the job can end: R15 (end)."""
    state = tx.state
    worker = state.workers.get(event.worker)
    if worker is None:
        departed = state.workers.departed.get(event.worker)
        why = departed.reason if departed is not None else "it is not of this job"
        reason = f"worker {event.worker} is done but no longer part of the job: {why}"
        tx.emit(do.StopWorker(reason, event.worker))
        return
    worker = detector.mark_reconnected(tx, worker)
    if not worker.is_member or event.fence != state.fence or worker.has_left:
        return  # the server answers an older question with the world that it is in
    all_results = state.limits.all_results
    _mark_left(tx, worker, event.position, WorkerStatus.SUCCESS)
    if all_results and state.stage is not JobStage.RUNNING:
        return  # another member was lost: this one takes part in the next world, too
    state.current.results = state.current.results.put(event.worker, event.result)
    assert state.world is not None
    complete = len(state.current.results) == state.world.size if all_results else worker.rank == 0
    if complete:
        state.timers.done_since = tx.now


def on_worker_raised(tx: Transition, event: messages.WorkerRaised) -> None:
    """Evict the worker and count the failure. The slot is not at fault if the world was over already: user code with
    connections of its own, such as those of torch.distributed, raises because a peer is gone."""
    state = tx.state
    world_ended = state.stage is JobStage.REGROUPING and event.fence == state.fence
    worker, departed = state.workers.get(event.worker), state.workers.departed.get(event.worker)
    if worker is not None:
        *_, what = "no traceback", *event.traceback.strip().splitlines()
        where = format_position(event.position)
        detector.evict(tx, worker, f"it raised an exception at {where}: {what.strip()}")
        gone = state.workers.departed[event.worker]
        state.workers.record_departure(event.worker, replace(gone, reported_end=True))
    elif departed is not None and departed.exit_unreported:
        state.workers.record_departure(event.worker, replace(departed, exit_unreported=False))
    else:
        return
    place = event.fence.generation if event.fence is not None else 0, event.worker, event.position
    failure = WorkerFailure(tx.now, *place, event.fingerprint, event.traceback)
    failures.record_failure(tx, failure, slot_at_fault=not world_ended)


def on_worker_exited(tx: Transition, event: messages.WorkerExited) -> None:
    state = tx.state
    state.possibly_alive.confirm_dead(event.worker)
    worker, departed = state.workers.get(event.worker), state.workers.departed.get(event.worker)
    how = event.reason or f"exit code {event.exit_code}"
    was_killed = event.exit_code in KILLED_EXIT_CODES
    if worker is not None:
        evict_worker = detector.evict_externally_lost if was_killed else detector.evict
        evict_worker(tx, worker, f"its process ended ({how})")
        detail = f"the process of {tx.describe(worker)} ended: {how}"
        failures.record_exit(tx, event, worker.took_part, True, detail)
    elif departed is None:
        state.workers.record_departure(event.worker, DepartedWorker(f"its process ended ({how})"))
    elif departed.exit_unreported and event.exit_code != 0:
        if not was_killed:  # its connection broke because it failed by itself
            state.failures.externally_lost = state.failures.externally_lost.drop(event.worker)
        state.workers.record_departure(event.worker, replace(departed, exit_unreported=False))
        detail = f"the process of worker {event.worker} ended: {how}"
        if departed.took_part:
            told = tx.cite(detail, departed.event_id)
            tx.emit(do.NotifyUser(told))  # the world's break reason was announced before this was known
        failures.record_exit(tx, event, departed.took_part, False, detail)
