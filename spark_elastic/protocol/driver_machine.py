"""The driver's decisions: `step(state, event) -> (state, commands)`, pure.

Handlers turn an event into records (`registry`) and evidence (`evidence`, `failures`); `forming.settle` then looks
at how things stand and decides on worlds, announcements and the end. It must not know clocks, sockets or Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import DriverCommand, LaunchSlot, Outcome, ReleaseSlot, StopWorker
from spark_elastic.protocol.driver_state import DriverState, Failure, Stage, Turn
from spark_elastic.protocol.evidence import (
    STOPPED,
    break_world,
    hear,
    judge,
    lose,
    lose_slot,
    mark_hiccup,
    scan,
    suspect,
)
from spark_elastic.protocol.failures import blame, spell
from spark_elastic.protocol.forming import end, settle
from spark_elastic.protocol.registry import Gone, JobRecord, SlotRecord, WorkerRecord
from spark_elastic.protocol.types import Fence, Limits, Position, SlotId, WorkerId, WorkerStatus

__all__ = ["DriverState", "initial", "step"]

BACK_OFF = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0)  # seconds before a slot job is launched, by fruitless predecessors


def initial(limits: Limits, attempt: int) -> tuple[DriverState, tuple[DriverCommand, ...]]:
    """A job that begins: ask for all the slots it may have."""
    turn = Turn(DriverState(limits, attempt), 0.0)
    for number in range(1, limits.max_workers + 1):
        _launch(turn, JobRecord(number), f"slot {number} of {limits.max_workers}")
    return turn.state, tuple(turn.commands)


def step(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, tuple[DriverCommand, ...]]:
    """What follows from an event. `state` itself is never changed."""
    turn = Turn(state, event.now)
    if state.stage is Stage.ENDED:
        _after_the_end(turn, event)
        return state, tuple(turn.commands)
    handler: Callable[[Turn, Any], None] = HANDLERS[type(event)]
    handler(turn, event)
    if not isinstance(event, on.SlotBeat) or turn.commands:  # a mere sign of life changes nothing
        settle(turn)
    return turn.state, tuple(turn.commands)


# ---- slots and their jobs


def _slot_registered(turn: Turn, event: on.SlotRegistered) -> None:
    state = turn.state
    known = state.slots.get(event.slot)
    job = state.jobs.get(event.job)
    if known is not None:
        turn.put_slot(replace(known, heard=turn.now))
    elif event.slot in state.gone_slots:
        turn.say(ReleaseSlot(f"slot {event.slot} was given up: {state.gone_slots[event.slot]}", event.slot))
    elif job is None:
        _refuse(turn, event.slot, f"slot {event.slot} belongs to slot job {event.job}, which is over")
    elif event.host in state.draining_hosts:
        _refuse(turn, event.slot, f"host {event.host} drains: {state.draining_hosts[event.host]}")
    else:
        state.jobs = state.jobs.put(event.job, replace(job, slots=job.slots + 1))
        turn.put_slot(SlotRecord(event.slot, event.job, event.host, turn.now, extra=job.slots > 0))


def _refuse(turn: Turn, slot: SlotId, reason: str) -> None:
    turn.state.gone_slots = turn.state.gone_slots.put(slot, reason)
    turn.say(ReleaseSlot(reason, slot))


def _slot_beat(turn: Turn, event: on.SlotBeat) -> None:
    state = turn.state
    slot = state.slots.get(event.slot)
    if slot is None:
        if event.slot in state.gone_slots:
            turn.say(
                ReleaseSlot(f"slot {event.slot} was given up: {state.gone_slots[event.slot]}", event.slot)
            )
        return
    slot = replace(slot, heard=turn.now)
    turn.put_slot(slot)
    gone = state.gone_workers.get(event.worker)
    if gone is not None:
        turn.say(StopWorker(f"worker {event.worker} was given up: {gone.reason}", event.worker, kill=True))
    elif event.worker:
        if event.worker not in state.workers:
            _adopt(turn, slot, event.worker)
        worker = state.workers.get(event.worker)
        if worker is not None and event.state not in STOPPED:
            turn.put(replace(worker, heard=turn.now))


def _slot_job_ended(turn: Turn, event: on.SlotJobEnded) -> None:
    state = turn.state
    job = state.jobs.get(event.job)
    if job is None:
        return
    for slot in [slot for slot in state.slots.values() if slot.job == event.job]:
        lose_slot(turn, slot, f"slot job {event.job} ended: {event.reason}")
    state.jobs = state.jobs.drop(event.job)
    if event.cancelled:
        end(turn, Outcome.CANCELLED, f"slot job {event.job} was cancelled: {event.reason}")
    elif state.done_since is None:
        fruitless = 0 if job.warmed or job.host_lost else job.fruitless + 1
        number = state.next_job
        _launch(turn, JobRecord(number, fruitless), f"slot job {event.job} ended ({event.reason})")


def _launch(turn: Turn, job: JobRecord, reason: str) -> None:
    state = turn.state
    state.jobs = state.jobs.put(job.job, job)
    state.next_job = job.job + 1
    turn.say(LaunchSlot(reason, job.job, BACK_OFF[min(job.fruitless, len(BACK_OFF) - 1)]))


def _host_lost(turn: Turn, event: on.HostLost) -> None:
    state = turn.state
    state.draining_hosts = state.draining_hosts.drop(event.host)
    for slot in [slot for slot in state.slots.values() if slot.host == event.host]:
        lose_slot(turn, slot, f"host {event.host} is lost: {event.reason}")
        job = state.jobs.get(slot.job)
        if job is not None:
            state.jobs = state.jobs.put(slot.job, replace(job, host_lost=True))


# ---- workers


def _worker_started(turn: Turn, event: on.WorkerStarted) -> None:
    state = turn.state
    slot = state.slots.get(event.slot)
    if slot is None:
        if event.slot in state.gone_slots:
            turn.say(
                ReleaseSlot(f"slot {event.slot} was given up: {state.gone_slots[event.slot]}", event.slot)
            )
    elif event.worker not in state.workers and event.worker not in state.gone_workers:
        _adopt(turn, replace(slot, heard=turn.now), event.worker)


def _adopt(turn: Turn, slot: SlotRecord, name: WorkerId) -> None:
    """`name` is the slot's worker now; another that it had has ended."""
    state = turn.state
    previous = state.workers.get(slot.worker) if slot.worker is not None else None
    if previous is not None:
        lose(turn, previous, f"its slot started worker {name} in its place", liable=True)
    worker = WorkerRecord(name, slot.slot, slot.host, turn.now, extra=slot.extra)
    turn.put(worker)
    turn.put_slot(replace(slot, worker=name))
    if slot.host in state.draining_hosts:
        _send_home(turn, worker, f"host {slot.host} drains: {state.draining_hosts[slot.host]}")


def _worker_joins(turn: Turn, event: on.WorkerJoins) -> None:
    worker = _known(turn, event.worker, event.slot, event.fence)
    if worker is None:
        return
    worker = hear(turn, worker)
    if worker.rank is None:
        _arrive(turn, worker)
    elif event.fence == turn.state.fence:
        _leaves_world(turn, worker, event)
    elif turn.state.stage is Stage.REGROUPING:
        # It never heard of the world that it is in, and that one is over by now.
        _come(turn, worker, event.position, WorkerStatus.READY)
    # Else it has not heard of it yet: the server answers its repeated question with that world.


def _leaves_world(turn: Turn, worker: WorkerRecord, event: on.WorkerJoins) -> None:
    """A member comes back from the world that it was in."""
    state = turn.state
    _come(turn, worker, event.position, WorkerStatus.READY)
    if state.regroup_since is None:
        state.regroup_since = turn.now
    if not event.planned:
        saw = f", which saw {', '.join(event.suspects)} break" if event.suspects else ""
        break_world(turn, f"{turn.title(worker)} could not go on{saw}: {event.reason or 'its group broke'}")
        suspect(turn, event.suspects)


def _known(turn: Turn, name: WorkerId, slot_name: SlotId, fence: Fence | None) -> WorkerRecord | None:
    """The living worker that asks; one that cannot take part is told to stop."""
    state = turn.state
    gone, slot = state.gone_workers.get(name), state.slots.get(slot_name)
    worker = state.workers.get(name)
    if gone is not None:
        turn.say(StopWorker(f"worker {name} was given up: {gone.reason}", name))
        return None
    if worker is None and slot is None:
        turn.say(StopWorker(f"worker {name} is of slot {slot_name}, which is not of this job", name))
        return None
    if fence is not None and (worker is None or worker.rank is None or fence.attempt != state.attempt):
        turn.say(
            StopWorker(f"worker {name} comes from world {fence.generation}, in which it is no member", name)
        )
        return None
    if worker is None and slot is not None:
        _adopt(turn, slot, name)
    return state.workers.get(name)


def _arrive(turn: Turn, worker: WorkerRecord) -> None:
    """A warm newcomer."""
    state = turn.state
    if worker.arrival:
        return
    state.arrivals += 1
    turn.put(replace(worker, arrival=state.arrivals, status=WorkerStatus.WARM))
    state.waiting = state.waiting.put(worker.worker, None)
    slot = state.slots.get(worker.slot)
    job = state.jobs.get(slot.job) if slot is not None else None
    if job is not None and not job.warmed:
        state.jobs = state.jobs.put(job.job, replace(job, warmed=True))


def _come(turn: Turn, worker: WorkerRecord, position: Position | None, status: WorkerStatus) -> None:
    """A member is back from its world, with the position of its state."""
    if not worker.came:
        turn.state.absent -= 1
        turn.state.unformed -= not worker.formed
    if worker.worker not in turn.state.results:
        turn.put(replace(worker, came=True, formed=True, position=position, status=status))


def _worker_formed(turn: Turn, event: on.WorkerFormed) -> None:
    worker = turn.state.workers.get(event.worker)
    if (
        worker is not None
        and worker.rank is not None
        and event.fence == turn.state.fence
        and not worker.formed
    ):
        turn.state.unformed -= 1
        turn.put(replace(worker, formed=True, status=WorkerStatus.RUNNING, heard=turn.now))


def _worker_exited(turn: Turn, event: on.WorkerExited) -> None:
    state = turn.state
    worker, gone = state.workers.get(event.worker), state.gone_workers.get(event.worker)
    how = event.reason or f"exit code {event.exit_code}"
    if worker is not None:
        lose(turn, worker, f"its process ended ({how})")
        _count(turn, event.worker, worker.position, f"the process of {turn.title(worker)} ended: {how}")
    elif gone is None:
        ended = Gone(f"its process ended ({how})", WorkerStatus.FAILURE)
        state.gone_workers = state.gone_workers.put(event.worker, ended)
    elif gone.liable and event.exit_code != 0:
        state.gone_workers = state.gone_workers.put(event.worker, replace(gone, liable=False))
        _count(turn, event.worker, None, f"the process of worker {event.worker} ended: {how}")


def _count(turn: Turn, worker: WorkerId, position: Position | None, detail: str) -> None:
    blame(turn, Failure(turn.now, turn.state.generation, worker, position, "", detail), end)


def _worker_failed(turn: Turn, event: on.WorkerFailed) -> None:
    state = turn.state
    worker, gone = state.workers.get(event.worker), state.gone_workers.get(event.worker)
    if worker is not None:
        lose(
            turn, worker, f"it raised an exception at {spell(event.position)}: {_last_line(event.traceback)}"
        )
    elif gone is not None and gone.liable:
        state.gone_workers = state.gone_workers.put(event.worker, replace(gone, liable=False))
    else:
        return
    generation = event.fence.generation if event.fence is not None else 0
    failure = Failure(turn.now, generation, event.worker, event.position, event.fingerprint, event.traceback)
    blame(turn, failure, end)


def _last_line(traceback: str) -> str:
    lines = traceback.strip().splitlines()
    return lines[-1].strip() if lines else "no traceback"


def _worker_done(turn: Turn, event: on.WorkerDone) -> None:
    state = turn.state
    worker = state.workers.get(event.worker)
    if worker is None:
        gone = state.gone_workers.get(event.worker)
        why = gone.reason if gone is not None else "it is not of this job"
        turn.say(StopWorker(f"worker {event.worker} is done but was given up: {why}", event.worker))
        return
    worker = hear(turn, worker)
    if worker.rank is None or event.fence != state.fence or worker.came:
        return  # the server answers an older question with the world that it is in
    _come(turn, worker, event.position, WorkerStatus.SUCCESS)
    state.results = state.results.put(event.worker, event.result)
    if worker.rank == 0:
        state.done_since = turn.now


# ---- connections


def _connection_lost(turn: Turn, event: on.ConnectionLost) -> None:
    state = turn.state
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
    slot = state.slots.get(event.slot)
    if event.worker is not None:
        state.cut = state.cut.drop(event.worker)
    elif slot is not None:
        turn.put_slot(replace(slot, cut=None))


# ---- orders from outside


def _drain_requested(turn: Turn, event: on.DrainRequested) -> None:
    state = turn.state
    if event.host is not None:
        state.draining_hosts = state.draining_hosts.put(event.host, event.reason)
    for worker in tuple(state.workers.values()):
        if event.worker == worker.worker or (event.host is not None and worker.host == event.host):
            if worker.rank is None:
                _send_home(turn, worker, event.reason)
            elif not worker.draining:
                state.draining += 1
                turn.put(replace(worker, draining=event.reason))


def _send_home(turn: Turn, worker: WorkerRecord, reason: str) -> None:
    """A worker outside the world that shall not come into one."""
    lose(turn, worker, reason)
    turn.say(StopWorker(f"worker {worker.worker} leaves: {reason}", worker.worker))
    if worker.host in turn.state.draining_hosts:
        turn.say(ReleaseSlot(f"slot {worker.slot} drains: {reason}", worker.slot))


def _cancel_requested(turn: Turn, event: on.CancelRequested) -> None:
    end(turn, Outcome.CANCELLED, event.reason)


def _tick(turn: Turn, event: on.Tick) -> None:
    scan(turn)


def _after_the_end(turn: Turn, event: on.DriverEvent) -> None:
    """Whoever still asks is sent home."""
    match event:
        case on.SlotRegistered() | on.SlotBeat() | on.WorkerStarted():
            turn.say(ReleaseSlot("the job is over", event.slot))
        case on.WorkerJoins() | on.WorkerDone():
            turn.say(StopWorker("the job is over", event.worker))


HANDLERS: dict[type[on.DriverEvent], Callable[[Turn, Any], None]] = {
    on.Tick: _tick,
    on.SlotRegistered: _slot_registered,
    on.SlotBeat: _slot_beat,
    on.SlotJobEnded: _slot_job_ended,
    on.HostLost: _host_lost,
    on.WorkerStarted: _worker_started,
    on.WorkerJoins: _worker_joins,
    on.WorkerFormed: _worker_formed,
    on.ConnectionLost: _connection_lost,
    on.ConnectionBack: _connection_back,
    on.WorkerExited: _worker_exited,
    on.WorkerFailed: _worker_failed,
    on.WorkerDone: _worker_done,
    on.DrainRequested: _drain_requested,
    on.CancelRequested: _cancel_requested,
}
