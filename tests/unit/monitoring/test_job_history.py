"""The history of a job that the real driver machine decides on: world changes, their costs, phases, the report."""

from __future__ import annotations

import pytest

from spark_elastic.monitoring.job_history import MAX_ENTRIES
from spark_elastic.monitoring.report import WorldChangeKind
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import LaunchSlot
from spark_elastic.protocol.messages import WorkerDone
from spark_elastic.protocol.types import Fence, Phase, Position
from tests.unit.monitoring.played_job import SimulatedJob


def play_loss() -> SimulatedJob:
    """3 workers for 4 s, half a second of recovery, 2 workers for 2 s."""
    job = SimulatedJob.training(3)
    job.now = 5.0
    job.report(41)
    job.lose_host(2, step=40, regroup=0.5)
    job.form()
    job.now = 7.5
    job.finish()
    return job


def test_a_loss_is_one_world_change_with_its_cost() -> None:
    start, loss = play_loss().world_changes
    assert (start.kind, start.size, start.seconds) == (WorldChangeKind.START, 3, 1.0)
    seen = loss.kind, loss.before, loss.size, loss.seconds, loss.steps_lost
    assert seen == (WorldChangeKind.LOSS, 3, 2, 0.5, 1)
    assert "host host-2 is lost" in loss.reason
    assert str(loss).startswith(
        "world of 2: 1 of 3 lost, recovered in 0.50 s, 1 committed step lost (world 2, of 2 workers, continues"
    )


def test_each_second_of_a_job_belongs_to_one_phase() -> None:
    report = play_loss().result
    phases = {"start": 1.0, "training": 6.0, "recovery": 0.5, "planned": 0.0, "closing": 0.0}
    assert report.phases == pytest.approx(phases)
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert report.goodput == pytest.approx(6.0 / 7.5)
    assert report.useful_hours * 3600 == pytest.approx(3 * 4.0 + 2 * 2.0)
    assert report.reserved_hours * 3600 == pytest.approx(3 * 5.0 + 2 * 2.5)


def test_the_report_of_a_running_job_reaches_up_to_now() -> None:
    job = SimulatedJob.training(2)
    job.now = 11.0
    assert job.result.phases["training"] == pytest.approx(10.0)
    assert job.result.useful_hours * 3600 == pytest.approx(20.0)


def test_the_bulk_planes_time_belongs_to_its_world_however_late_it_arrives() -> None:
    job = SimulatedJob.training(3)
    first = job.world_changes[0].generation
    job.lose_host(2, step=40, regroup=0.5)
    job.form()
    job.history.on_progress({"bulk_seconds": 12.0, "bulk_generation": first})
    assert [change.bulk_seconds for change in job.result.world_changes] == [12.0, None]


def test_a_joining_worker_is_a_planned_change_and_costs_no_step() -> None:
    job = SimulatedJob(3)
    job.start_worker(1)
    job.start_worker(2)
    job.now = 12.0
    job.on(on.Tick(0))
    job.form()
    job.report(10)
    job.start_worker(3)
    job.now += 1.0
    job.on(on.Tick(0))
    job.leave_world(10, planned=True)
    job.now += 0.25
    job.form()
    joined = job.world_changes[-1]
    seen = joined.kind, joined.joined, joined.left, joined.seconds, joined.steps_lost
    assert seen == (WorldChangeKind.PLANNED, 1, 0, 0.25, 0)
    assert str(joined).startswith("world of 3: 1 joined in 0.25 s (world")


def test_a_second_loss_before_the_world_is_complete_prolongs_the_recovery() -> None:
    job = SimulatedJob.training(3)
    job.lose_host(2, step=1, regroup=0.5)
    job.lose_host(3, step=1, regroup=0.25)
    job.form()
    assert [change.seconds for change in job.world_changes] == [1.0, 0.75]
    assert [change.seconds for change in job.result.world_changes] == [1.0, None, 0.75]


def test_a_loss_before_the_first_world_is_complete_counts_as_a_loss() -> None:
    job = SimulatedJob(3)
    for number in (1, 2, 3):
        job.start_worker(number)
    job.now = 1.0
    job.lose_host(2, step=0, regroup=5.0)
    job.form()
    assert [change.kind for change in job.world_changes] == [WorldChangeKind.LOSS]
    assert [(change.left, change.seconds) for change in job.result.recoveries] == [(1, 5.0)]
    assert (job.result.phases["start"], job.result.phases["recovery"]) == (1.0, 5.0)


def test_a_loss_after_some_workers_have_finished_counts_as_a_loss() -> None:
    job = SimulatedJob.training(3, all_results=True)
    job.now = 5.0
    assert job.world is not None
    member = job.world.members[0]
    job.on(WorkerDone(member.worker, job.world.fence, Position(0, Phase.TRAIN, 40), "null"))
    job.now = 8.0
    job.lose_host(2, step=40, regroup=0.5)
    job.form()
    assert [change.kind for change in job.world_changes] == [WorldChangeKind.START, WorldChangeKind.LOSS]
    assert [change.seconds for change in job.result.recoveries] == [0.5]
    phases = {"start": 1.0, "training": 4.0, "closing": 3.0, "recovery": 0.5, "planned": 0.0}
    assert job.result.phases == pytest.approx(phases)


def test_restarts_before_the_next_report_do_not_lose_the_same_steps_again() -> None:
    job = SimulatedJob.training(1)
    job.report(7)
    for host in (1, 2, 3):
        job.move_alone(host)
    assert [change.steps_lost for change in job.world_changes] == [0, 7, 0, 0]
    job.report(2)
    job.move_alone(4)
    assert job.world_changes[-1].steps_lost == 2


def test_a_program_that_reports_no_steps_has_no_lost_steps() -> None:
    job = SimulatedJob.training(1)
    job.move_alone(1)
    (change,) = job.result.recoveries
    assert change.steps_lost is None
    assert "all 1 lost, restarted" in str(change)
    assert "(world 2, of 1 worker, continues from the beginning, for lack of a checkpoint" in str(change)
    assert "steps" not in str(change)
    assert "steps lost" not in str(job.result)


def test_checkpoint_seconds_of_successive_rank_0_processes_add_up() -> None:
    job = SimulatedJob(1)
    job.report(1, checkpoint_seconds=0.5)
    job.report(2, checkpoint_seconds=0.75)
    job.report(3, checkpoint_seconds=0.25)
    assert job.result.checkpoint_seconds == 1.0


def test_history_entries_are_bounded_and_repeated_ones_are_merged() -> None:
    job = SimulatedJob(1)
    for number in range(1000):
        job.history.on_transition(on.Tick(0.0), (LaunchSlot("wanted", number),), None)
    (entry,) = job.history._entries
    assert (entry["kind"], entry["times"]) == ("launch slot", 1000)
    for _ in range(2 * MAX_ENTRIES):
        job.on(on.WorkerStalled(0, "x", Fence(1, 1), "stuck"))
    assert len(job.history._entries) == MAX_ENTRIES
