"""The invariants can fail: machines that break one rule are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import driver_machine, worker_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import JobOutcome
from spark_elastic.protocol.driver.state import DriverState, PossiblyAliveMembers
from spark_elastic.protocol.events import Received
from spark_elastic.protocol.messages import RequestNextWorld, WorkerDone
from spark_elastic.protocol.types import Fence, Position, WorkerId, World
from spark_elastic.protocol.worker_machine import StepResult, WorkerStage, WorkerState
from spark_elastic.runs import checkpoint
from spark_elastic.runs.checkpoint import OwnedRun
from tests.simulator.fault_plan import (
    ALL_KILLED,
    CORRUPTED,
    DRIVER_TIMEOUT,
    TAKEN_OVER,
    Fault,
    FaultKind,
    FaultPlan,
    Moment,
    Share,
    plan_durable,
    random_plan,
    scene,
)
from tests.simulator.invariants import Violation
from tests.simulator.server import Step
from tests.simulator.simulation import WorkerStep, simulate

KILLED = Fault(FaultKind.KILL_WORKER, Moment.APPLIED, nth=6, target=0)
JOINED = Fault(FaultKind.ADD_HOST, Moment.EXCHANGE, nth=4)
Commands = tuple[do.DriverCommand, ...]


def _rewrite_commands(change: Callable[[do.DriverCommand], do.DriverCommand | None]) -> Step:
    """A driver machine whose commands are changed or, for None, left out."""

    def step(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
        after, commands = driver_machine.step(state, event)
        changed = [change(command) for command in commands]
        return after, tuple(command for command in changed if command is not None)

    return step


def _rewrite_worlds(change: Callable[[World], World]) -> Step:
    def change_world(command: do.DriverCommand) -> do.DriverCommand:
        if isinstance(command, do.PublishWorld):
            return replace(command, world=change(command.world))
        return command

    return _rewrite_commands(change_world)


def _choose_newcomer_as_source(world: World) -> World:
    return world if world.source is None else replace(world, source=world.size - 1)


def _put_newcomers_first(world: World) -> World:
    return replace(world, members=tuple(replace(m, rank=r) for r, m in enumerate(reversed(world.members))))


def _resume_from_oldest(world: World) -> World:
    return replace(world, resume=world.resume[::-1])


def _resume_from_nothing(world: World) -> World:
    return replace(world, resume=(), source=None) if world.resume else world


def _drop_aborts(command: do.DriverCommand) -> do.DriverCommand | None:
    return None if isinstance(command, do.AbortWorld) else command


def _form_too_early(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
    """Forms the next world before all members have left the last."""
    message = event.message if isinstance(event, Received) else None
    if isinstance(message, RequestNextWorld) and message.planned and state.workers.not_left > 1:
        state = replace(state, workers=replace(state.workers, not_left=1))
    return driver_machine.step(state, event)


def _end_too_early(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
    """Takes the first worker that stops to be done."""
    match event:
        case Received(now, RequestNextWorld(worker, Fence() as fence, Position() as position, planned=True)):
            event = Received(now, WorkerDone(worker, fence, position, "0:0"))
    return driver_machine.step(state, event)


DRIVERS: dict[str, tuple[Step, Fault]] = {
    "a newcomer is the source": (_rewrite_worlds(_choose_newcomer_as_source), JOINED),
    "newcomers come first": (_rewrite_worlds(_put_newcomers_first), JOINED),
    "a broken world is not aborted": (_rewrite_commands(_drop_aborts), KILLED),
    "two worlds are open": (_form_too_early, JOINED),
    "the end comes early": (_end_too_early, JOINED),
}


@pytest.mark.parametrize("rule", DRIVERS)
def test_a_driver_that_breaks_a_rule_is_caught(rule: str) -> None:
    step, fault = DRIVERS[rule]
    plan = scene(fault, hosts=3, num_workers=3)
    simulate(plan)
    assert _is_caught(plan, driver_step=step)


def _skip_sync(state: WorkerState, event: on.WorkerEvent) -> StepResult:
    """Trains on with whatever state it has."""
    after, commands = worker_machine.step(state, event)
    if after.stage is WorkerStage.SYNCING and after.world is not None:
        position = after.world.position
        return worker_machine.step(after, on.Synced(event.now, after.world.fence, position))  # type: ignore[arg-type]
    return after, commands


def _report_before_sync(state: WorkerState, event: on.WorkerEvent) -> StepResult:
    """R5 broken: takes the new position before the new state is there."""
    after, commands = worker_machine.step(state, event)
    if isinstance(event, on.GroupFormed) and after.stage is WorkerStage.SYNCING and after.world is not None:
        after = replace(after, position=after.world.position)
    return after, commands


def _lose_applied_step(state: WorkerState, event: on.WorkerEvent) -> StepResult:
    """Loses one applied step from its report."""
    if isinstance(event, on.Applied) and event.position.step == 5 and event.fence.generation == 1:
        return state, ()
    return worker_machine.step(state, event)


def _ignore_aborts(state: WorkerState, event: on.WorkerEvent) -> StepResult:
    return (state, ()) if isinstance(event, on.AbortReceived) else worker_machine.step(state, event)


WORKERS: dict[str, tuple[WorkerStep, tuple[Fault, ...]]] = {
    "a newcomer trains without state": (_skip_sync, (JOINED,)),
    "a position before its state": (
        _report_before_sync,
        (KILLED, Fault(FaultKind.KILL_WORKER, Moment.SYNCING, nth=2, target=0)),
    ),
    "a step that is not counted": (_lose_applied_step, ()),
}


@pytest.mark.parametrize("rule", WORKERS)
def test_a_worker_that_breaks_a_rule_is_caught(rule: str) -> None:
    step, faults = WORKERS[rule]
    plans = [scene(*faults, seed=seed, hosts=3, num_workers=3) for seed in range(30)]
    assert any(simulate(plan) and _is_caught(plan, worker_step=step) for plan in plans)


def test_workers_that_ignore_aborts_are_caught() -> None:
    """Most worlds break of themselves; some only by the driver's word."""
    assert any(_is_caught(random_plan(seed), worker_step=_ignore_aborts) for seed in range(100))


def _is_caught(plan: FaultPlan, match: str = "", **broken: Any) -> bool:
    """broken: machines, by the names that `simulate` gives them."""
    try:
        simulate(plan, **broken)
    except Violation as error:
        return match in str(error)
    return False


def test_a_driver_that_misses_a_message_hangs_and_is_caught() -> None:
    def forget_done(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
        match event:
            case Received(_, WorkerDone(worker=WorkerId("1-0.1"))):
                return state, ()
        return driver_machine.step(state, event)

    assert _is_caught(scene(), "did not end", driver_step=forget_done)


# ---- checkpoints


def _forget_old_members(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
    """R18 broken: does not wait for old members that may live."""
    return driver_machine.step(replace(state, possibly_alive=PossiblyAliveMembers()), event)


def _trust_spark(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
    """R18 broken: an executor that Spark calls lost is dead."""
    after, commands = driver_machine.step(state, event)
    after = after.copy()
    for name, member in after.possibly_alive.members.items():
        if member.executor_lost:
            after.possibly_alive.confirm_dead(name)
    return after, commands


def test_r18_a_driver_that_does_not_wait_for_old_members_is_caught() -> None:
    """A world of one is given up while its host is cut off, and trains on; another worker waits."""
    cut = Fault(FaultKind.CUT_OFF_HOST, Moment.FORWARD, duration=4.0)
    plans = [scene(cut, seed=seed, hosts=2, num_workers=1, max_workers=2, steps=200) for seed in range(6)]
    for plan in plans:
        simulate(plan)
    assert any(_is_caught(plan, "train on (R18)", driver_step=_forget_old_members) for plan in plans)


def test_r18_a_driver_that_trusts_sparks_report_of_a_lost_executor_is_caught() -> None:
    """All hosts are cut off the driver, and Spark calls their executors lost while they train on."""
    lost = Fault(FaultKind.PARTITION_AND_REPLACE, Moment.PUBLISHED, nth=3, share=Share.ALL, duration=12.0)
    plans = [plan_durable(lost, seed=seed, steps=600, driver_timeout=DRIVER_TIMEOUT) for seed in range(6)]
    for plan in plans:
        report = simulate(plan)
        assert report.end.outcome is JobOutcome.SUCCESS
        assert report.worlds[-1].resume
    assert any(_is_caught(plan, "train on (R18)", driver_step=_trust_spark) for plan in plans)


@pytest.mark.parametrize(
    ("change", "match"),
    [(_resume_from_oldest, "was taken although"), (_resume_from_nothing, "begins from nothing although")],
)
def test_p7_a_driver_that_loses_what_was_acknowledged_is_caught(
    change: Callable[[World], World], match: str
) -> None:
    assert _is_caught(plan_durable(ALL_KILLED), match, driver_step=_rewrite_worlds(change))


def test_p1_a_resume_one_step_too_far_is_caught() -> None:
    plan = plan_durable(ALL_KILLED)

    def report_later_position(state: WorkerState, event: on.WorkerEvent) -> StepResult:
        if isinstance(event, on.Synced) and state.world is not None and state.world.resume:
            assert event.position is not None
            event = replace(event, position=plan.find_next_position(event.position))
        return worker_machine.step(state, event)

    assert _is_caught(plan, "seed 1", worker_step=report_later_position)


def test_p7_an_undetected_damage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_check", lambda data, digest, name: None)
    assert _is_caught(plan_durable(*CORRUPTED), "damaged checkpoint")


def test_r10_a_driver_that_publishes_what_it_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnedRun, "check", lambda self: None)
    assert _is_caught(plan_durable(TAKEN_OVER, every=1), "attempt 1 published")
