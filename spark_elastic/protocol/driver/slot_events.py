"""What the driver machine makes of the events that concern slots, their jobs and hosts."""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import Outcome, ReleaseSlot, StopWorker
from spark_elastic.protocol.driver.durable import job_is_gone
from spark_elastic.protocol.driver.ending import end
from spark_elastic.protocol.driver.evidence import lose_slot
from spark_elastic.protocol.driver.jobs import follow, give_back, hasten, refuse
from spark_elastic.protocol.driver.listing import refusal
from spark_elastic.protocol.driver.state import JobRecord, SlotEnd, SlotRecord, Turn
from spark_elastic.protocol.driver.worker_events import adopt
from spark_elastic.protocol.types import NOT_RUNNING


def slot_registered(turn: Turn, event: on.SlotRegistered) -> None:
    state = turn.state
    known = state.slots.get(event.slot)
    job = state.jobs.get(event.launch)
    if known is not None:
        turn.put_slot(replace(known, heard=turn.now))
    elif event.slot in state.gone_slots:
        turn.say(ReleaseSlot(f"slot {event.slot} was given up: {state.gone_slots[event.slot]}", event.slot))
    elif job is None:
        refuse(turn, event.slot, f"slot {event.slot} belongs to slot job {event.launch}, which is over")
    else:
        extra = job.slots > 0
        slot = SlotRecord(
            event.slot, event.launch, event.host, turn.now, extra, node=event.node, unfit=event.unfit
        )
        _receive(turn, slot, job)


def _receive(turn: Turn, slot: SlotRecord, job: JobRecord) -> None:
    state = turn.state
    why = refusal(turn, slot)
    if why and not slot.extra:
        refuse(turn, slot.slot, why)
        return
    state.jobs = state.jobs.put(slot.job, replace(job, slots=job.slots + 1))
    if slot.host not in state.hosts:
        state.hosts |= {slot.host}
    turn.put_slot(slot)
    if why:
        give_back(turn, slot, why)


def slot_beat(turn: Turn, event: on.SlotBeat) -> None:
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
            adopt(turn, slot, event.worker)
        worker = state.workers.get(event.worker)
        if worker is not None and event.state not in NOT_RUNNING:
            turn.put(replace(worker, heard=turn.now))


def slot_job_ended(turn: Turn, event: on.LaunchEnded) -> None:
    state = turn.state
    job = state.jobs.get(event.launch)
    if job is None:
        return
    how = SlotEnd.DISOWNED if event.executor_lost else SlotEnd.SEEN
    for slot in turn.slots_of(event.launch):
        lose_slot(turn, slot, f"slot job {event.launch} ended: {event.reason}", how)
    job_is_gone(turn, event.launch, event.executor_lost)
    state.jobs = state.jobs.drop(event.launch)
    if event.cancelled:
        end(turn, Outcome.CANCELLED, f"slot job {event.launch} was cancelled: {event.reason}")
    elif state.done_since is None:
        follow(turn, job, event.reason)


def host_appeared(turn: Turn, event: on.HostAppeared) -> None:
    """One that was not asked for a slot yet is, at once, whatever others had to be asked in vain."""
    state = turn.state
    if event.host not in state.hosts:
        state.hosts |= {event.host}
        hasten(turn)


def host_lost(turn: Turn, event: on.HostLost) -> None:
    state = turn.state
    state.draining_hosts = state.draining_hosts.drop(event.host)
    state.blacklist = state.blacklist.forget_host(event.host)
    for slot in turn.slots_on(event.host):
        lose_slot(turn, slot, f"host {event.host} is lost: {event.reason}", SlotEnd.DISOWNED)
        job = state.jobs.get(slot.job)
        if job is not None:
            state.jobs = state.jobs.put(slot.job, replace(job, host_lost=True))
