"""Checkpoints in simulation: everything dies and is resumed (P7, R10, R18), and the invariants of that can fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import driver_machine, worker_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.driver.state import DriverState, PossiblyAliveMembers
from spark_elastic.protocol.worker_machine import StepResult, WorkerState
from spark_elastic.runs import checkpoint
from spark_elastic.runs.owned_run import OwnedRun
from tests.simulator.fault_plan import DRIVER_TIMEOUT, Fault, FaultKind, FaultPlan, Moment, Share, scene
from tests.simulator.invariants import Violation
from tests.simulator.simulation import simulate

Commands = tuple[do.DriverCommand, ...]
ALL_KILLED = Fault(FaultKind.KILL_WORKER, Moment.PUBLISHED, nth=3, share=Share.ALL)
CORRUPTED = Fault(FaultKind.CORRUPT_CHECKPOINT, Moment.PUBLISHED, nth=3)
TAKEN_OVER = Fault(FaultKind.TAKE_OVER, Moment.PUBLISHED, nth=2)


def plan_durable(*faults: Fault, every: int = 2, **of_scene: Any) -> FaultPlan:
    return replace(scene(*faults, **of_scene), checkpoint_every=every)


def test_p7_all_workers_are_lost_and_the_newest_checkpoint_is_taken() -> None:
    report = simulate(plan_durable(ALL_KILLED))
    assert [len(world.resume) for world in report.worlds] == [0, 3]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    ("moment", "nth"), [(Moment.WRITING, 3), (Moment.WRITTEN, 3), (Moment.PUBLISHED, 3), (Moment.APPLIED, 30)]
)
def test_p7_another_driver_resumes_wherever_the_first_dies(moment: Moment, nth: int, silent: bool) -> None:
    report = simulate(plan_durable(Fault(FaultKind.KILL_DRIVER, moment, nth, silent=silent)))
    assert report.end.outcome is do.JobOutcome.SUCCESS
    assert report.worlds[-1].fence.attempt == 2
    assert report.worlds[-1].resume


def test_p7_a_damaged_checkpoint_gives_way_to_the_one_before() -> None:
    report = simulate(plan_durable(CORRUPTED, replace(ALL_KILLED, after=0.001)))
    assert report.end.outcome is do.JobOutcome.SUCCESS
    assert report.worlds[-1].resume


def test_r10_a_driver_that_lost_its_run_ends() -> None:
    report = simulate(plan_durable(TAKEN_OVER))
    assert report.end.outcome is do.JobOutcome.SUCCESS
    assert report.worlds[-1].fence.attempt == 2
    assert "was taken over by another driver" in report.event_log


# ---- the invariants can fail


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


def _resume_from_oldest(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
    return _with_resume(state, event, -1)


def _resume_from_nothing(state: DriverState, event: on.DriverEvent) -> tuple[DriverState, Commands]:
    return _with_resume(state, event, 0)


def _with_resume(state: DriverState, event: on.DriverEvent, step: int) -> tuple[DriverState, Commands]:
    after, commands = driver_machine.step(state, event)
    changed: list[do.DriverCommand] = []
    for command in commands:
        if isinstance(command, do.PublishWorld) and command.world.resume:
            resume = command.world.resume[::step] if step else ()
            world = replace(command.world, resume=resume, source=0 if resume else None)
            command = replace(command, world=world)
        changed.append(command)
    return after, tuple(changed)


def test_r18_a_driver_that_does_not_wait_for_old_members_is_caught() -> None:
    """A world of one is given up while its host is cut off, and trains on; another worker waits."""
    cut = Fault(FaultKind.CUT_OFF_HOST, Moment.FORWARD, duration=4.0)
    plans = [scene(cut, seed=seed, hosts=2, num_workers=1, max_workers=2, steps=200) for seed in range(6)]
    for plan in plans:
        simulate(plan)
    assert any(_is_caught(plan, driver_step=_forget_old_members, match="train on (R18)") for plan in plans)


def test_r18_a_driver_that_trusts_sparks_report_of_a_lost_executor_is_caught() -> None:
    """All hosts are cut off the driver, and Spark calls their executors lost while they train on."""
    lost = Fault(FaultKind.PARTITION_AND_REPLACE, Moment.PUBLISHED, nth=3, share=Share.ALL, duration=12.0)
    plans = [plan_durable(lost, seed=seed, steps=600, driver_timeout=DRIVER_TIMEOUT) for seed in range(6)]
    for plan in plans:
        report = simulate(plan)
        assert report.end.outcome is do.JobOutcome.SUCCESS
        assert report.worlds[-1].resume
    assert any(_is_caught(plan, driver_step=_trust_spark, match="train on (R18)") for plan in plans)


@pytest.mark.parametrize(
    ("step", "match"),
    [(_resume_from_oldest, "was taken although"), (_resume_from_nothing, "begins from nothing although")],
)
def test_p7_a_driver_that_loses_what_was_acknowledged_is_caught(step: object, match: str) -> None:
    assert _is_caught(plan_durable(ALL_KILLED), driver_step=step, match=match)


def test_p1_a_resume_one_step_too_far_is_caught() -> None:
    plan = plan_durable(ALL_KILLED)

    def report_later_position(state: WorkerState, event: on.WorkerEvent) -> StepResult:
        if isinstance(event, on.Synced) and state.world is not None and state.world.resume:
            assert event.position is not None
            event = replace(event, position=plan.find_next_position(event.position))
        return worker_machine.step(state, event)

    assert _is_caught(plan, worker_step=report_later_position, match="seed 1")


def test_p7_an_undetected_damage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_check", lambda data, digest, name: None)
    assert _is_caught(plan_durable(CORRUPTED, replace(ALL_KILLED, after=0.001)), match="damaged checkpoint")


def test_r10_a_driver_that_publishes_what_it_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnedRun, "check", lambda self: None)
    assert _is_caught(plan_durable(TAKEN_OVER, every=1), match="attempt 1 published")


def _is_caught(plan: FaultPlan, match: str, **broken: object) -> bool:
    try:
        simulate(plan, **broken)  # type: ignore[arg-type]
    except Violation as error:
        return match in str(error)
    return False
