"""The rules of worlds one by one, on the simulated cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from spark_elastic.protocol.commands import JobOutcome
from tests.simulator.fault_plan import Fault, FaultKind, Moment, Share, scene
from tests.simulator.simulation import simulate

SEEDS = range(8)


@pytest.mark.parametrize("moment", [m for m in Moment if m is not Moment.TIME])
@pytest.mark.parametrize("target", [0, 2])
def test_r01_death_at_any_point_of_a_step_costs_no_step(moment: Moment, target: int) -> None:
    """Some have the step and others not; the history stays whole (the simulation judges it)."""
    for seed in SEEDS:
        report = simulate(scene(Fault(FaultKind.KILL_WORKER, moment, nth=3, target=target), seed=seed))
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
        assert report.seconds < 6.0, report.event_log


def test_r04_state_comes_from_survivors_and_late_workers_join_as_newcomers() -> None:
    """A stopped member is left out; it comes back without a step, ranked after those who stayed."""
    report = simulate(scene(Fault(FaultKind.STOP_WORKER, Moment.EXCHANGE, nth=5, target=0, duration=60.0)))
    assert report.end.outcome is JobOutcome.SUCCESS
    stopped = report.worlds[0].members[0].worker
    after = report.worlds[1]
    assert after.member(stopped) is None
    assert [m.worker for m in after.members] == [m.worker for m in report.worlds[0].members[1:]]
    assert report.worlds[-1].members[-1].position is None


def test_r05_a_laggard_whose_sync_broke_keeps_its_old_position() -> None:
    """Two losses: the first leaves ranks a step apart, the second breaks the sync that would have evened them."""
    apart = 0
    for seed in range(60):
        report = simulate(
            scene(
                Fault(FaultKind.KILL_WORKER, Moment.COMPLETE, nth=9, target=3),
                Fault(FaultKind.KILL_WORKER, Moment.SYNCING, nth=2, target=0),
                seed=seed,
            )
        )
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
        apart += any(len({m.position for m in w.members if m.position}) > 1 for w in report.worlds)
    assert apart > 3  # the scene happens


def test_r06_all_ranks_stop_at_one_boundary_and_no_step_is_repeated() -> None:
    """Scale up: every old member brings the same position into the next world."""
    for seed in SEEDS:
        plan = scene(
            Fault(FaultKind.ADD_HOST, Moment.APPLIED, nth=6), seed=seed, hosts=3, steps=40, num_workers=3
        )
        report = simulate(plan)
        assert [world.size for world in report.worlds] == [3, 4], report.event_log
        assert len({m.position for m in report.worlds[1].members[:3]}) == 1
        assert report.worlds[1].version > report.worlds[0].version


def test_r12_a_pause_of_the_driver_stops_nothing() -> None:
    """All connections break at once and come back within the lease: no worker is evicted."""
    for seed in SEEDS:
        report = simulate(
            scene(Fault(FaultKind.MASS_DISCONNECT, Moment.EXCHANGE, nth=9, duration=1.5), seed=seed)
        )
        assert len(report.worlds) == 1, report.event_log


def test_r12_a_slot_that_sends_no_heartbeats_is_given_back() -> None:
    for seed in SEEDS:
        silence = Fault(FaultKind.SILENCE_SLOT, Moment.EXCHANGE, nth=5, target=seed % 4)
        report = simulate(scene(silence, seed=seed, steps=600))
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
        assert "because they were silent" in report.event_log
        assert report.worlds[-1].size == 4, report.event_log
        assert len(report.worlds) < 9, report.event_log


def test_r13_a_deterministic_failure_ends_the_job_with_its_traceback() -> None:
    report = simulate(scene(Fault(FaultKind.RAISE_AT_ROW, Moment.EXCHANGE, nth=5, target=7)))
    assert report.end.outcome is JobOutcome.USER_ERROR
    assert "failing row at step 7" in report.end.detail
    assert len(report.worlds) == 2


def test_r13_one_exception_of_one_worker_does_not_end_the_job() -> None:
    report = simulate(scene(Fault(FaultKind.RAISE, Moment.EXCHANGE, nth=5, target=2)))
    assert report.end.outcome is JobOutcome.SUCCESS


@pytest.mark.parametrize("hosts", [2, 4])
def test_r13_of_two_hosts_with_a_dead_link_one_is_left_out(hosts: int) -> None:
    for seed in SEEDS:
        dead = Fault(
            FaultKind.DEAD_LINK,
            Moment.EXCHANGE,
            nth=9,
            target=seed % hosts,
            share=Share.TWO,
            duration=math.inf,
        )
        report = simulate(
            scene(dead, seed=seed, hosts=hosts, steps=60, num_workers=hosts, driver_timeout=10.0)
        )
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
        assert report.worlds[-1].size == hosts - 1, report.event_log
        assert "could not reach each other" in report.event_log
        assert report.seconds < 40.0, report.event_log


def test_r13_a_host_that_reaches_none_of_the_others_is_the_one_left_out() -> None:
    for seed in SEEDS:
        dead = Fault(
            FaultKind.DEAD_LINK, Moment.EXCHANGE, nth=9, target=seed % 4, share=Share.ALL, duration=math.inf
        )
        report = simulate(scene(dead, seed=seed, steps=60, driver_timeout=10.0))
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
        assert report.worlds[-1].size == 3, report.event_log


def test_r13_a_dead_link_that_comes_back_costs_no_worker() -> None:
    for seed in SEEDS:
        dead = Fault(FaultKind.DEAD_LINK, Moment.EXCHANGE, nth=9, target=1, share=Share.TWO, duration=6.0)
        report = simulate(scene(dead, seed=seed, driver_timeout=10.0))
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
        assert {world.size for world in report.worlds} == {4}, report.event_log


def test_r13_a_dead_link_ends_a_job_that_needs_both_hosts() -> None:
    dead = Fault(FaultKind.DEAD_LINK, Moment.EXCHANGE, nth=9, target=1, share=Share.TWO, duration=math.inf)
    report = simulate(scene(dead, min_workers=4, driver_timeout=10.0))
    assert report.end.outcome is JobOutcome.USER_ERROR
    assert "could not continue and blames" in report.end.reason


def test_r14_a_second_attempt_is_an_extra_slot() -> None:
    for seed in SEEDS:
        second = Fault(FaultKind.SECOND_ATTEMPT, Moment.EXCHANGE, nth=5, target=1)
        report = simulate(scene(second, seed=seed, hosts=5))
        assert report.end.outcome is JobOutcome.SUCCESS
        assert len(report.worlds) == 1  # the world is full: it parks


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("target", [0, 1, 3])
def test_r15_a_job_succeeds_after_a_loss_while_some_workers_are_done(target: int, whole: bool) -> None:
    for seed in SEEDS:
        late = Fault(FaultKind.KILL_WORKER, Moment.CLOSING, nth=2, after=0.01, target=target)
        report = simulate(scene(late, seed=seed, all_results=whole))
        assert report.end.outcome is JobOutcome.SUCCESS
        assert "null" not in (report.end.results if whole else report.end.results[:1])


def test_r21_nobody_waits_for_a_newcomer_that_is_before_its_loop() -> None:
    """It works there for 2 s: the others train on without it, and it joins at a boundary."""
    for seed in SEEDS:
        plan = scene(Fault(FaultKind.KILL_WORKER, Moment.EXCHANGE, nth=5, target=1), seed=seed, steps=150)
        report, prompt = simulate(replace(plan, before_loop=2.0)), simulate(plan)
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
    report = simulate(scene(Fault(FaultKind.KILL_WORKER, Moment.EXCHANGE, nth=20, share=Share.ALL)))
    assert report.end.outcome is JobOutcome.SUCCESS
    assert report.worlds[1].source is None
    assert "continues from the beginning, for lack of a checkpoint" in report.worlds[1].reason


@pytest.mark.parametrize("kind", [FaultKind.KILL_WORKER, FaultKind.KILL_SLOT, FaultKind.KILL_HOST])
def test_training_continues_from_the_only_survivor(kind: FaultKind) -> None:
    for seed in SEEDS:
        report = simulate(
            scene(Fault(kind, Moment.EXCHANGE, nth=20, share=Share.ALL_BUT_ONE, target=1), seed=seed)
        )
        assert report.end.outcome is JobOutcome.SUCCESS
        assert report.worlds[1].position is not None, report.event_log


def test_a_drained_host_leaves_at_a_boundary() -> None:
    for seed in SEEDS:
        report = simulate(
            scene(Fault(FaultKind.DRAIN_HOST, Moment.EXCHANGE, nth=8, target=1, duration=9.0), seed=seed)
        )
        assert "over" not in report.worlds[1].reason, report.event_log
        gone = report.worlds[0].size - 1
        assert report.worlds[1].size == gone
        assert len({m.position for m in report.worlds[1].members}) == 1


def test_a_drain_of_all_members_waits_for_a_newcomer_that_takes_the_state() -> None:
    for seed in SEEDS:
        everybody = Fault(FaultKind.DRAIN_WORKER, Moment.EXCHANGE, nth=8, share=Share.ALL)
        report = simulate(scene(everybody, Fault(FaultKind.ADD_HOST, after=0.9), seed=seed))
        assert report.end.outcome is JobOutcome.SUCCESS
        assert all(world.source is not None for world in report.worlds[1:]), report.event_log


def test_a_planned_stop_and_a_loss_at_once() -> None:
    for seed in range(40):
        report = simulate(
            scene(
                Fault(FaultKind.ADD_HOST, Moment.EXCHANGE, nth=4),
                Fault(FaultKind.KILL_WORKER, Moment.WARMING, nth=4, after=0.3 + seed * 0.01, target=seed % 3),
                seed=seed,
                hosts=3,
                num_workers=3,
            )
        )
        assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
