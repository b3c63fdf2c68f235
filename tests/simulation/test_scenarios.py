"""The rules of worlds one by one, on the simulated cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from spark_elastic.protocol.commands import JobOutcome
from tests.simulator.fault_plan import (
    ALL_KILLED,
    CORRUPTED,
    TAKEN_OVER,
    Fault,
    FaultKind,
    Moment,
    Share,
    plan_durable,
    scene,
)
from tests.simulator.simulation import Report, simulate


def play(*faults: Fault, seeds: int = 8, **of_scene: Any) -> list[Report]:
    """Of as many seeds; each job succeeds, and the simulation judges its history."""
    reports = [simulate(scene(*faults, seed=seed, **of_scene)) for seed in range(1, seeds + 1)]
    for report in reports:
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
    return reports


@pytest.mark.parametrize("moment", [m for m in Moment if m is not Moment.TIME])
@pytest.mark.parametrize("target", [0, 2])
def test_r01_death_at_any_point_of_a_step_costs_no_step(moment: Moment, target: int) -> None:
    """Some have the step and others not; the history stays whole."""
    for report in play(Fault(FaultKind.KILL_WORKER, moment, nth=3, target=target)):
        assert report.seconds < 6.0, report.event_log


def test_r04_state_comes_from_survivors_and_late_workers_join_as_newcomers() -> None:
    """A stopped member is left out; it comes back without a step, ranked after those who stayed."""
    (report,) = play(Fault(FaultKind.STOP_WORKER, Moment.EXCHANGE, nth=5, duration=60.0), seeds=1)
    stopped, *others = (member.worker for member in report.worlds[0].members)
    after = report.worlds[1]
    assert after.member(stopped) is None
    assert [m.worker for m in after.members] == others
    assert report.worlds[-1].members[-1].position is None


def test_r05_a_laggard_whose_sync_broke_keeps_its_old_position() -> None:
    """Two losses: the first leaves ranks a step apart, the second breaks the sync that would have evened them."""
    first = Fault(FaultKind.KILL_WORKER, Moment.COMPLETE, nth=9, target=3)
    second = Fault(FaultKind.KILL_WORKER, Moment.SYNCING, nth=2)
    worlds = [world for report in play(first, second, seeds=60) for world in report.worlds]
    apart = [w for w in worlds if len({m.position for m in w.members if m.position}) > 1]
    assert len(apart) > 3, "the scene happens"


def test_r06_all_ranks_stop_at_one_boundary_and_no_step_is_repeated() -> None:
    """Scale up: every old member brings the same position into the next world."""
    joins = Fault(FaultKind.ADD_HOST, Moment.APPLIED, nth=6)
    for report in play(joins, hosts=3, steps=40, num_workers=3):
        assert [world.size for world in report.worlds] == [3, 4], report.event_log
        assert len({m.position for m in report.worlds[1].members[:3]}) == 1
        assert report.worlds[1].version > report.worlds[0].version


def test_r12_a_pause_of_the_driver_stops_nothing() -> None:
    """All connections break at once and come back within the lease: no worker is evicted."""
    for report in play(Fault(FaultKind.MASS_DISCONNECT, Moment.EXCHANGE, nth=9, duration=1.5)):
        assert len(report.worlds) == 1, report.event_log


@pytest.mark.parametrize("target", [0, 3])
def test_r12_a_slot_that_sends_no_heartbeats_is_given_back(target: int) -> None:
    silence = Fault(FaultKind.SILENCE_SLOT, Moment.EXCHANGE, nth=5, target=target)
    for report in play(silence, seeds=4, steps=600):
        assert "because they were silent" in report.event_log
        assert report.worlds[-1].size == 4, report.event_log
        assert len(report.worlds) < 9, report.event_log


def test_r13_a_deterministic_failure_ends_the_job_with_its_traceback() -> None:
    report = simulate(scene(Fault(FaultKind.RAISE_AT_ROW, Moment.EXCHANGE, nth=5, target=7)))
    assert report.end.outcome is JobOutcome.USER_ERROR
    assert "failing row at step 7" in report.end.detail
    assert len(report.worlds) == 2


def test_r13_one_exception_of_one_worker_does_not_end_the_job() -> None:
    play(Fault(FaultKind.RAISE, Moment.EXCHANGE, nth=5, target=2), seeds=1)


DEAD_LINK = Fault(FaultKind.DEAD_LINK, Moment.EXCHANGE, nth=9, target=1, share=Share.TWO, duration=math.inf)


@pytest.mark.parametrize("target", [0, 3])
@pytest.mark.parametrize("hosts", [2, 4])
def test_r13_of_two_hosts_with_a_dead_link_one_is_left_out(hosts: int, target: int) -> None:
    dead = replace(DEAD_LINK, target=target)
    for report in play(dead, seeds=4, hosts=hosts, steps=60, num_workers=hosts, driver_timeout=10.0):
        assert report.worlds[-1].size == hosts - 1, report.event_log
        assert "could not reach each other" in report.event_log
        assert report.seconds < 40.0, report.event_log


@pytest.mark.parametrize("target", [0, 3])
def test_r13_a_host_that_reaches_none_of_the_others_is_the_one_left_out(target: int) -> None:
    dead = replace(DEAD_LINK, target=target, share=Share.ALL)
    for report in play(dead, seeds=4, steps=60, driver_timeout=10.0):
        assert report.worlds[-1].size == 3, report.event_log


def test_r13_a_dead_link_that_comes_back_costs_no_worker() -> None:
    for report in play(replace(DEAD_LINK, duration=6.0), driver_timeout=10.0):
        assert {world.size for world in report.worlds} == {4}, report.event_log


def test_r13_a_dead_link_ends_a_job_that_needs_both_hosts() -> None:
    report = simulate(scene(DEAD_LINK, min_workers=4, driver_timeout=10.0))
    assert report.end.outcome is JobOutcome.USER_ERROR
    assert "could not continue and blames" in report.end.reason


def test_r14_a_second_attempt_is_an_extra_slot() -> None:
    for report in play(Fault(FaultKind.SECOND_ATTEMPT, Moment.EXCHANGE, nth=5, target=1), hosts=5):
        assert len(report.worlds) == 1  # the world is full: it parks


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("target", [0, 1, 3])
def test_r15_a_job_succeeds_after_a_loss_while_some_workers_are_done(target: int, whole: bool) -> None:
    late = Fault(FaultKind.KILL_WORKER, Moment.CLOSING, nth=2, after=0.01, target=target)
    for report in play(late, all_results=whole):
        assert "null" not in (report.end.results if whole else report.end.results[:1])


def test_r21_nobody_waits_for_a_newcomer_that_is_before_its_loop() -> None:
    """It works there for 2 s: the others train on without it, and it joins at a boundary."""
    killed = Fault(FaultKind.KILL_WORKER, Moment.EXCHANGE, nth=5, target=1)
    for seed, prompt in enumerate(play(killed, steps=150), start=1):
        plan = replace(scene(killed, seed=seed, steps=150), before_loop=2.0)
        report = simulate(plan)
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
        assert [world.size for world in report.worlds] == [4, 3, 4], report.event_log
        began, joined = (world.position.step for world in report.worlds[1:] if world.position is not None)
        assert joined - began > 2.0 / plan.forward / 2, "steps of the three while it worked"
        assert report.seconds < prompt.seconds + 1.0


def test_r16_the_first_world_waits_for_num_workers_for_a_limited_time() -> None:
    report = simulate(scene(hosts=2))
    assert [world.size for world in report.worlds] == [2]
    assert report.seconds > 2.0
    assert simulate(scene(hosts=4)).worlds[0].size == 4


def test_training_starts_again_and_says_so_after_the_loss_of_all_workers() -> None:
    (report,) = play(Fault(FaultKind.KILL_WORKER, Moment.EXCHANGE, nth=20, share=Share.ALL), seeds=1)
    assert report.worlds[1].source is None
    assert "continues from the beginning, for lack of a checkpoint" in report.worlds[1].reason


@pytest.mark.parametrize("kind", [FaultKind.KILL_WORKER, FaultKind.KILL_SLOT, FaultKind.KILL_HOST])
def test_training_continues_from_the_only_survivor(kind: FaultKind) -> None:
    for report in play(Fault(kind, Moment.EXCHANGE, nth=20, share=Share.ALL_BUT_ONE, target=1)):
        assert report.worlds[1].position is not None, report.event_log


def test_a_drained_host_leaves_at_a_boundary() -> None:
    for report in play(Fault(FaultKind.DRAIN_HOST, Moment.EXCHANGE, nth=8, target=1, duration=9.0)):
        assert "over" not in report.worlds[1].reason, report.event_log
        assert report.worlds[1].size == report.worlds[0].size - 1
        assert len({m.position for m in report.worlds[1].members}) == 1


def test_a_drain_of_all_members_waits_for_a_newcomer_that_takes_the_state() -> None:
    everybody = Fault(FaultKind.DRAIN_WORKER, Moment.EXCHANGE, nth=8, share=Share.ALL)
    for report in play(everybody, Fault(FaultKind.ADD_HOST, after=0.9)):
        assert all(world.source is not None for world in report.worlds[1:]), report.event_log


def test_a_planned_stop_and_a_loss_at_once() -> None:
    joins = Fault(FaultKind.ADD_HOST, Moment.EXCHANGE, nth=4)
    lost = Fault(FaultKind.KILL_WORKER, Moment.WARMING, nth=4)
    for seed in range(40):
        faults = joins, replace(lost, after=0.3 + seed * 0.01, target=seed % 3)
        report = simulate(scene(*faults, seed=seed, hosts=3, num_workers=3))
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log


# ---- checkpoints: everything dies and is resumed


def test_p7_all_workers_are_lost_and_the_newest_checkpoint_is_taken() -> None:
    report = simulate(plan_durable(ALL_KILLED))
    assert [len(world.resume) for world in report.worlds] == [0, 3]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    ("moment", "nth"), [(Moment.WRITING, 3), (Moment.WRITTEN, 3), (Moment.PUBLISHED, 3), (Moment.APPLIED, 30)]
)
def test_p7_another_driver_resumes_wherever_the_first_dies(moment: Moment, nth: int, silent: bool) -> None:
    report = simulate(plan_durable(Fault(FaultKind.KILL_DRIVER, moment, nth, silent=silent)))
    assert report.end.outcome is JobOutcome.SUCCESS
    assert report.worlds[-1].fence.attempt == 2
    assert report.worlds[-1].resume


def test_p7_a_damaged_checkpoint_gives_way_to_the_one_before() -> None:
    report = simulate(plan_durable(*CORRUPTED))
    assert report.end.outcome is JobOutcome.SUCCESS
    assert report.worlds[-1].resume


def test_r10_a_driver_that_lost_its_run_ends() -> None:
    report = simulate(plan_durable(TAKEN_OVER))
    assert report.end.outcome is JobOutcome.SUCCESS
    assert report.worlds[-1].fence.attempt == 2
    assert "was taken over by another driver" in report.event_log
