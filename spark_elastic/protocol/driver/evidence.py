"""Losses: what counts as evidence that a worker, a slot or a world is gone, and how the records change."""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol.commands import Abort, StopWorker
from spark_elastic.protocol.driver.durable import MARGIN, given_up, slot_is_gone
from spark_elastic.protocol.driver.state import Gone, SlotEnd, SlotRecord, Stage, Turn, WorkerRecord
from spark_elastic.protocol.types import WorkerId, WorkerStatus

SCANS_PER_LEASE = 20
# Seconds: imports keep a host busy, nobody waits for a worker that is not warm, and a new one would import again.
STARTING_LEASE = 30.0


def break_world(turn: Turn, reason: str) -> None:
    """The world is broken: abort it, at the first evidence only. Nothing breaks it after the job's result (R15)."""
    state = turn.state
    if state.stage is not Stage.RUNNING or state.done_since is not None:
        return
    for stall in state.stalled.values():
        reason = reason if stall in reason else f"{reason}; {stall}"
    state.stage = Stage.REGROUPING
    state.because = reason
    state.regroup_since = turn.now
    turn.say(Abort(f"world {state.generation} is over: {reason}", state.fence))


def lose(turn: Turn, worker: WorkerRecord, reason: str, kill: bool = False, liable: bool = False) -> None:
    """Take a living worker off the records. kill: it may be alive, its slot shall end it. liable: see `Gone`."""
    state = turn.state
    title = turn.title(worker)
    if worker.worker in state.stalled:
        reason = f"{reason}; {state.stalled[worker.worker]}"
    if kill:
        given_up(turn, worker)
    retire(turn, worker, Gone(reason, WorkerStatus.FAILURE, liable, took_part(worker)))
    state.recall |= worker.rank is not None and not worker.draining
    if kill:
        turn.say(StopWorker(f"{title} is given up: {reason}", worker.worker, kill=True))
    if worker.rank is not None and worker.worker not in state.results:
        break_world(turn, f"{title} is lost: {reason}")


def lose_from_outside(
    turn: Turn, worker: WorkerRecord, reason: str, kill: bool = False, liable: bool = False
) -> None:
    """The same, where no doing of the program's is seen: a signal, silence, or the end of its slot or host."""
    if worker.rank is not None:
        turn.state.taken = turn.state.taken.put(worker.worker, turn.state.generation)
    lose(turn, worker, reason, kill, liable)


def took_part(worker: WorkerRecord) -> bool:
    """Whether it has ever worked in a world, this one or an earlier one."""
    return worker.rank is not None and (worker.formed or worker.position is not None)


def retire(turn: Turn, worker: WorkerRecord, gone: Gone) -> None:
    """Move a living worker to the gone ones."""
    state = turn.state
    turn.drop(worker)
    state.waiting = state.waiting.drop(worker.worker)
    state.cut = state.cut.drop(worker.worker)
    state.unclosed -= {worker.worker}
    state.gone_workers = state.gone_workers.put(worker.worker, gone)
    state.draining -= bool(worker.draining)
    slot = state.slots.get(worker.slot)
    if slot is not None and slot.worker == worker.worker:
        turn.put_slot(replace(slot, worker=None))
    if worker.rank is not None:
        state.absent -= not worker.came
        state.unformed -= not worker.formed


def lose_slot(turn: Turn, slot: SlotRecord, reason: str, how: SlotEnd) -> None:
    """A slot task is gone, and its worker with it."""
    state = turn.state
    worker = state.workers.get(slot.worker) if slot.worker is not None else None
    if worker is not None:
        if how is SlotEnd.DISOWNED:
            given_up(turn, worker, disowned=True)
        lose_from_outside(turn, worker, reason)
    turn.drop_slot(slot)
    slot_is_gone(turn, slot.slot, how)
    state.gone_slots = state.gone_slots.put(slot.slot, reason)
    state.blacklist = state.blacklist.forget(slot.slot)
    state.barred = state.barred.drop(slot.slot)
    state.kills = state.kills.drop(slot.slot)
    state.killed = state.killed.drop(slot.slot)
    state.unclosed -= {slot.slot}
    job = state.jobs.get(slot.job)
    if job is not None:
        state.jobs = state.jobs.put(slot.job, replace(job, slots=job.slots - 1))


def hear(turn: Turn, worker: WorkerRecord) -> WorkerRecord:
    """The worker spoke, over a connection that stands. Returns its renewed record."""
    mark_hiccup(turn)
    turn.state.cut = turn.state.cut.drop(worker.worker)
    renewed = replace(worker, heard=turn.now)
    turn.put(renewed)
    return renewed


def suspect(turn: Turn, suspects: tuple[WorkerId, ...]) -> None:
    """Note workers whom peers saw break. That alone evicts nobody."""
    state = turn.state
    world = state.world
    state.suspected |= {name for name in suspects if world is not None and world.member(name) is not None}
    for name in suspects:
        judge(turn, name)


def judge(turn: Turn, name: WorkerId) -> None:
    """Whether what is known of a worker's broken connection makes it lost.

    Broken and seen broken by a peer: at once. Broken together with its slot's: once it is clear that not everybody's
    are. Broken alone: after `reconnect_grace`. Were all broken at once, it was the server's hiccup, and nobody is
    judged by connections before they had that grace to come back.
    """
    state = turn.state
    worker, since = state.workers.get(name), state.cut.get(name)
    if worker is None or since is None or _everybody_is_cut(turn):
        return
    broken = turn.now - max(since, state.hiccup, state.deaf)
    slot = state.slots.get(worker.slot)
    own = state.hiccup < since
    if own and name in state.suspected:
        lose_from_outside(
            turn, worker, "its connection broke and a peer saw it break", kill=True, liable=True
        )
    elif own and slot is not None and slot.cut is not None and _settled(turn, max(since, slot.cut)):
        lose_from_outside(turn, worker, "its connection and its slot's broke", kill=True, liable=True)
    elif broken >= state.limits.reconnect_grace:
        lose_from_outside(
            turn, worker, f"its connection has been broken for {broken:.1f} s", kill=True, liable=True
        )


def notice_sleep(turn: Turn) -> None:
    """Before any event is answered. A scan that did not come for half a lease shows that the driver was stopped, and
    what it was sent meanwhile it may still have to read: whatever was heard first says nothing of the others (R12).
    """
    state = turn.state
    if turn.now - state.scanned > state.limits.lease / 2:
        state.deaf = turn.now


def mark_hiccup(turn: Turn) -> None:
    """Remember that everybody was cut, as long as it lasts."""
    if turn.state.cut and _everybody_is_cut(turn):
        turn.state.hiccup = turn.now


def scan(turn: Turn) -> None:
    """On a tick: broken connections, and now and then the leases."""
    state = turn.state
    mark_hiccup(turn)
    for name in tuple(state.cut):
        judge(turn, name)
    if turn.now < state.next_lease_scan:
        return
    lease = state.limits.lease
    state.scanned = turn.now
    state.next_lease_scan = turn.now + lease / SCANS_PER_LEASE
    if _driver_is_deaf(turn):
        state.deaf = turn.now
        return
    for worker in tuple(state.workers.values()):
        slot = state.slots.get(worker.slot)
        patience = max(lease, STARTING_LEASE) if worker.status is WorkerStatus.STARTING else lease
        if slot is not None and turn.now - max(slot.heard, state.deaf) > patience:
            lose_from_outside(
                turn, worker, f"its slot was silent for {turn.now - slot.heard:.1f} s", kill=True
            )
        elif turn.now - max(worker.heard, state.deaf) > patience:
            lose_from_outside(
                turn, worker, f"its process has not run for {turn.now - worker.heard:.1f} s", kill=True
            )
    _bury_silent_slots(turn)


def _bury_silent_slots(turn: Turn) -> None:
    """Drop slots that must have ended themselves, since they were cut off from the driver for too long (R12). If Spark
    has started their task anew, their job goes on, and nothing else tells of their end. Those with a worker stay."""
    state = turn.state
    patience = state.limits.driver_timeout + MARGIN
    for slot in tuple(state.slots.values()):
        silence = turn.now - max(slot.heard, state.deaf)
        if slot.worker is None and silence > patience:
            lose_slot(turn, slot, f"slot {slot.slot} was silent for {silence:.1f} s", SlotEnd.TOLD)


def _driver_is_deaf(turn: Turn) -> bool:
    """Nobody at all was heard for half a lease, in which each slot beats twice, and it was not that all connections
    broke: the driver is what is cut off, or it slept. R12: training goes on without it until `driver_timeout`, after
    which the workers have ended themselves.
    """
    state = turn.state
    silences = [turn.now - state.slots[w.slot].heard for w in state.workers.values() if w.slot in state.slots]
    return (
        bool(silences)
        and state.limits.lease / 2 < min(silences) <= state.limits.driver_timeout
        and not _everybody_is_cut(turn)
    )


def _settled(turn: Turn, since: float) -> bool:
    return turn.now - since >= turn.state.limits.disconnect_window


def _everybody_is_cut(turn: Turn) -> bool:
    """Whether every worker that ever had a connection has lost it. Workers that still start have none to lose."""
    cut = turn.state.cut
    if len(cut) < len(turn.state.workers) - turn.state.starting:
        return False
    return all(
        worker.worker in cut or worker.status is WorkerStatus.STARTING
        for worker in turn.state.workers.values()
    )
