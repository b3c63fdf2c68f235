"""The invariants can fail: machines that break one rule are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import driver_machine, worker_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.driver.state import DriverState
from spark_elastic.protocol.events import Received
from spark_elastic.protocol.messages import RequestNextWorld, WorkerDone
from spark_elastic.protocol.types import Fence, Position, WorkerId
from spark_elastic.protocol.worker_machine import StepResult, WorkerStage, WorkerState
from tests.simulator.fault_plan import Fault, FaultKind, FaultPlan, Moment, random_plan, scene
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


def _choose_newcomer_as_source(command: do.DriverCommand) -> do.DriverCommand:
    if isinstance(command, do.PublishWorld) and command.world.source is not None:
        return replace(command, world=replace(command.world, source=command.world.size - 1))
    return command


def _put_newcomers_first(command: do.DriverCommand) -> do.DriverCommand:
    if isinstance(command, do.PublishWorld):
        turned = tuple(replace(m, rank=r) for r, m in enumerate(reversed(command.world.members)))
        return replace(command, world=replace(command.world, members=turned))
    return command


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
    "a newcomer is the source": (_rewrite_commands(_choose_newcomer_as_source), JOINED),
    "newcomers come first": (_rewrite_commands(_put_newcomers_first), JOINED),
    "a broken world is not aborted": (_rewrite_commands(_drop_aborts), KILLED),
    "two worlds are open": (_form_too_early, JOINED),
    "the end comes early": (_end_too_early, JOINED),
}


@pytest.mark.parametrize("rule", DRIVERS)
def test_a_driver_that_breaks_a_rule_is_caught(rule: str) -> None:
    step, fault = DRIVERS[rule]
    plan = scene(fault, hosts=3, num_workers=3)
    simulate(plan)
    with pytest.raises(Violation):
        simulate(plan, driver_step=step)


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
    assert any(_is_caught(step, plan) for plan in plans)


def test_workers_that_ignore_aborts_are_caught() -> None:
    """Most worlds break of themselves; some only by the driver's word."""
    assert any(_is_caught(_ignore_aborts, random_plan(seed)) for seed in range(100))


def _is_caught(step: WorkerStep, plan: FaultPlan) -> bool:
    simulate(plan)
    try:
        simulate(plan, worker_step=step)
    except Violation:
        return True
    return False


def test_a_driver_that_misses_a_message_hangs_and_is_caught() -> None:
    def forget_done(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
        match event:
            case Received(_, WorkerDone(worker=WorkerId("1-0.1"))):
                return state, ()
        return driver_machine.step(state, event)

    with pytest.raises(Violation, match="did not end"):
        simulate(scene(), driver_step=forget_done)
