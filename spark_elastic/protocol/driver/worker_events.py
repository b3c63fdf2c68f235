"""What the driver machine makes of the events that concern workers. Each function is one event's part of a turn."""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import ReleaseSlot, StopWorker
from spark_elastic.protocol.driver.durable import seen_dead
from spark_elastic.protocol.driver.ending import end
from spark_elastic.protocol.driver.evidence import (
    break_world,
    hear,
    lose,
    lose_from_outside,
    suspect,
    took_part,
)
from spark_elastic.protocol.driver.failures import blame, spell, starve
from spark_elastic.protocol.driver.jobs import give_back, strike
from spark_elastic.protocol.driver.listing import unwanted
from spark_elastic.protocol.driver.state import Failure, Gone, SlotRecord, Stage, Turn, WorkerRecord
from spark_elastic.protocol.types import (
    DRIVER_SILENT_EXIT_CODE,
    KILLED_EXIT_CODES,
    Fence,
    Position,
    SlotId,
    WorkerId,
    WorkerStatus,
)

OWN_CODES = (
    1,
    DRIVER_SILENT_EXIT_CODE,
)  # exit codes with which the worker, not the user's function, ends its process
KILLS_PER_SLOT = 20  # kills within the failure window that count as losses, not as failures
# Kills of one slot's workers in a row, before they took part in a world, that count as losses.
KILLS_BORNE = 2


def worker_started(turn: Turn, event: on.WorkerStarted) -> None:
    state = turn.state
    slot = state.slots.get(event.slot)
    if slot is None:
        if event.slot in state.gone_slots:
            turn.say(
                ReleaseSlot(f"slot {event.slot} was given up: {state.gone_slots[event.slot]}", event.slot)
            )
    elif event.worker not in state.workers and event.worker not in state.gone_workers:
        adopt(turn, replace(slot, heard=turn.now), event.worker)


def adopt(turn: Turn, slot: SlotRecord, name: WorkerId) -> None:
    """`name` is the slot's worker now; another that it had has ended."""
    state = turn.state
    previous = state.workers.get(slot.worker) if slot.worker is not None else None
    if previous is not None and _number(name) < _number(previous.worker):
        # What it said was held up on the way, and the slot has another worker since.
        ended = Gone(
            f"its slot started worker {previous.worker} in its place", WorkerStatus.FAILURE, liable=True
        )
        state.gone_workers = state.gone_workers.put(name, ended)
        return
    if previous is not None:
        lose(turn, previous, f"its slot started worker {name} in its place", liable=True)
    worker = WorkerRecord(name, slot.slot, slot.host, turn.now, extra=slot.extra)
    turn.put(worker)
    slot = replace(slot, worker=name)
    turn.put_slot(slot)
    why = unwanted(turn, slot)
    if why:
        give_back(turn, slot, why)


def _number(name: WorkerId) -> int:
    """The worker's number within its slot."""
    return int(name.rpartition(".")[2])


def worker_joins(turn: Turn, event: on.WorkerJoins) -> None:
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
    """The record of the worker that asks; None, and it is told to stop, if it cannot take part."""
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
        adopt(turn, slot, name)
    return state.workers.get(name)


def _arrive(turn: Turn, worker: WorkerRecord) -> None:
    """A warm worker asks for its first world."""
    state = turn.state
    if worker.arrival:
        return
    state.arrivals += 1
    turn.put(replace(worker, arrival=state.arrivals, arrived=turn.now, status=WorkerStatus.WARM))
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


def worker_formed(turn: Turn, event: on.WorkerFormed) -> None:
    worker = turn.state.workers.get(event.worker)
    if (
        worker is not None
        and worker.rank is not None
        and event.fence == turn.state.fence
        and not worker.formed
    ):
        turn.state.unformed -= 1
        turn.put(replace(worker, formed=True, status=WorkerStatus.RUNNING, heard=turn.now))
        _praise(turn, worker)


def _praise(turn: Turn, worker: WorkerRecord) -> None:
    state = turn.state
    if state.blacklist:
        state.blacklist = state.blacklist.praise(worker.slot, worker.host)
    state.kills = state.kills.drop(worker.slot)


def worker_exited(turn: Turn, event: on.WorkerExited) -> None:
    state = turn.state
    seen_dead(turn, event.worker)
    worker, gone = state.workers.get(event.worker), state.gone_workers.get(event.worker)
    how = event.reason or f"exit code {event.exit_code}"
    if worker is not None:
        losing = lose_from_outside if event.exit_code in KILLED_EXIT_CODES else lose
        losing(turn, worker, f"its process ended ({how})")
        detail = f"the process of {turn.title(worker)} ended: {how}"
        _count(turn, event, took_part(worker), _own_word(turn, worker, event.exit_code), detail)
    elif gone is None:
        ended = Gone(f"its process ended ({how})", WorkerStatus.FAILURE)
        state.gone_workers = state.gone_workers.put(event.worker, ended)
    elif gone.liable and event.exit_code != 0:
        if event.exit_code not in KILLED_EXIT_CODES:  # why its connection broke
            state.taken = state.taken.drop(event.worker)
        state.gone_workers = state.gone_workers.put(event.worker, replace(gone, liable=False))
        _count(turn, event, gone.took_part, "", f"the process of worker {event.worker} ended: {how}")


def _own_word(turn: Turn, worker: WorkerRecord, code: int) -> str:
    """The fingerprint of a code that a function chose (`os._exit(5)`), which is like an exception; else ""."""
    chosen = turn.state.limits.all_results and took_part(worker) and code > 0 and code not in OWN_CODES
    return f"exit code {code}" if chosen else ""


def _count(turn: Turn, event: on.WorkerExited, took_part: bool, fingerprint: str, detail: str) -> None:
    """A process that was killed, or ended itself since the driver was silent (R12), is a loss like that of a host, and
    its slot is not to blame, unless its workers end so one after the other before they ever take part in a world, or
    again and again within the failure window."""
    state = turn.state
    slot = event.worker.rpartition(".")[0]
    if slot in state.barred:
        return
    if event.out_of_memory:
        starve(turn, detail, end)
    elif event.exit_code in KILLED_EXIT_CODES:
        kills = 0 if took_part else state.kills.get(slot, 0) + 1
        state.kills = state.kills.put(slot, kills)
        often = _killed(turn, slot)
        if kills <= KILLS_BORNE and often <= KILLS_PER_SLOT:
            return
        if kills > KILLS_BORNE:
            detail += f"; {kills} of its slot ended so in a row before they took part in a world"
        else:
            detail += f"; {often} of its slot ended so within {state.limits.failure_window:g} s"
    # The step is not known: failures in worlds that began at the same position count as failures at one place.
    position = state.world.start_position if state.world is not None else None
    crash = ""
    if event.crashed_at:
        detail = f"{detail} in {event.crashed_at}"
        if took_part or state.world is None:  # what newcomers crash of need not stop those who train
            crash = f"{event.reason} in {event.crashed_at}"
    host = state.slots[slot].host if slot in state.slots else ""
    _blame(
        turn,
        Failure(turn.now, state.generation, event.worker, position, fingerprint, detail, crash, host),
    )


def _killed(turn: Turn, slot: SlotId) -> int:
    """Note that a worker of the slot was killed; how many were within the failure window."""
    state = turn.state
    oldest = turn.now - state.limits.failure_window
    times = (*(at for at in state.killed.get(slot, ()) if at >= oldest), turn.now)
    state.killed = state.killed.put(slot, times)
    return len(times)


def _blame(turn: Turn, failure: Failure, slots_fault: bool = True) -> None:
    """Count a failure, and strike its slot if that is at fault. Those of barred slots do no harm and do not count."""
    name = failure.worker.rpartition(".")[0]
    if name in turn.state.barred:
        return
    blame(turn, failure, end)
    slot = turn.state.slots.get(name)
    if slots_fault and slot is not None and turn.state.stage is not Stage.ENDED:
        strike(turn, slot.slot, slot.host)


def worker_failed(turn: Turn, event: on.WorkerFailed) -> None:
    """What is raised in a world that is over says nothing of the slot: user code with connections of its own, as those
    of torch.distributed, raises since a peer is gone."""
    state = turn.state
    over = state.stage is Stage.REGROUPING and event.fence == state.fence
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
    _blame(turn, failure, slots_fault=not over)


def _last_line(traceback: str) -> str:
    lines = traceback.strip().splitlines()
    return lines[-1].strip() if lines else "no traceback"


def worker_done(turn: Turn, event: on.WorkerDone) -> None:
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
    whole = state.limits.all_results
    _come(turn, worker, event.position, WorkerStatus.SUCCESS)
    if whole and state.stage is not Stage.RUNNING:
        return  # another member was lost: it takes part in the next world, too
    state.results = state.results.put(event.worker, event.result)
    assert state.world is not None
    if len(state.results) == state.world.size if whole else worker.rank == 0:
        state.done_since = turn.now
