"""`max_runtime` in the driver's machine."""

from __future__ import annotations

import pytest

from spark_elastic.protocol.commands import AbortWorld, AnnounceChange, End, JobOutcome
from spark_elastic.protocol.driver.forming import LAST_STOP_TIMEOUT
from tests.unit.protocol.driver_bench import Bench, at, name


@pytest.mark.parametrize(
    ("limits", "world", "seconds"),
    [
        ({"max_runtime": 100.0}, True, 100.0 + LAST_STOP_TIMEOUT),  # it reaches no step boundary
        ({"max_runtime": 100.0}, False, 100.0),
        ({}, True, None),
    ],
)
def test_a_job_ends_with_its_time(limits: dict[str, float], world: bool, seconds: float | None) -> None:
    bench = Bench.running(1, num_workers=1, max_workers=1, **limits) if world else Bench(**limits)
    bench.wait((seconds or 500.0) - 1.0 - bench.now, heartbeats_of=[1])
    assert not bench.find_commands(End)
    bench.wait(1.2, heartbeats_of=[1])
    assert [end.outcome for end in bench.find_commands(End)] == [JobOutcome.TIME_LIMIT] * bool(limits)


# ---- the end comes together with something else: it still needs a boundary that all know to be the last


def _start_two(most: int = 2) -> Bench:
    return Bench.running(1, 2, num_workers=2, max_workers=most, max_runtime=100.0)


def _check_planned_end(bench: Bench, step: int, *jobs: int) -> None:
    """The newest world is told, stops, and the job ends."""
    assert not bench.find_commands(End)
    bench.form()
    bench.wait(0.5, heartbeats_of=jobs)
    assert bench.find_commands(AnnounceChange)[-1].version.job_ends
    assert bench.find_commands(AnnounceChange)[-1].version > bench.world.version
    bench.stop_planned(step, *(name(job) for job in jobs))
    assert bench.end.outcome is JobOutcome.TIME_LIMIT


def test_after_a_planned_change_that_comes_late_the_next_world_learns_that_the_time_is_up() -> None:
    bench = _start_two(3)
    bench.wait(98.0 - bench.now, heartbeats_of=[1, 2])
    bench.start_warm(3)
    bench.wait(1.0, heartbeats_of=[1, 2, 3])
    assert not bench.find_commands(AnnounceChange)[-1].version.job_ends
    bench.wait(3.0, heartbeats_of=[1, 2, 3])
    assert bench.find_commands(AnnounceChange)[-1].version.job_ends, "the next boundary may be the last"
    bench.stop_planned(50, name(1), name(2))  # the announcement may still have been on its way
    assert bench.members() == [name(1), name(2), name(3)]
    _check_planned_end(bench, 51, 1, 2, 3)


@pytest.mark.parametrize("lost_at", [99.5, 101.0])
def test_a_loss_around_the_end_of_the_time_costs_no_checkpoint(lost_at: float) -> None:
    bench = _start_two()
    bench.wait(lost_at - bench.now, heartbeats_of=[1, 2])
    bench.exit(name(2), -9)
    bench.wait(1.0, heartbeats_of=[1])
    assert not bench.find_commands(End)
    bench.regroup(50, name(1))
    assert bench.members() == [name(1)]
    _check_planned_end(bench, 51, 1)


def test_a_loss_after_the_time_is_up_ends_a_job_without_resets_by_its_time() -> None:
    bench = Bench.running(1, 2, num_workers=2, max_workers=2, max_runtime=100.0, reset_limit=0)
    bench.wait(101.0 - bench.now, heartbeats_of=[1, 2])
    bench.exit(name(2), -9)
    bench.regroup(50, name(1))
    bench.check_end(JobOutcome.TIME_LIMIT, "(max_runtime)")


def test_a_member_that_writes_its_last_checkpoint_is_waited_for_longer_than_at_another_stop() -> None:
    bench = _start_two()
    bench.wait(101.0 - bench.now, heartbeats_of=[1, 2])
    bench.stop_planned(50, name(1))
    bench.wait(LAST_STOP_TIMEOUT - 5.0, heartbeats_of=[1, 2])
    assert not bench.find_commands(AbortWorld)
    bench.join(name(2), bench.fence, at(50), planned=True)
    assert bench.end.outcome is JobOutcome.TIME_LIMIT


def test_without_survivors_a_job_whose_time_is_up_ends_at_once() -> None:
    bench = _start_two()
    bench.wait(101.0 - bench.now, heartbeats_of=[1, 2])
    for job in (1, 2):
        bench.exit(name(job), -9)
    assert bench.end.outcome is JobOutcome.TIME_LIMIT
