from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import AnnounceChange, End, JobOutcome
from spark_elastic.protocol.messages import CheckpointWritten, WorkerExited, WorkerRaised, WorkerStarted
from spark_elastic.protocol.types import Checkpoint, SlotId, WorkerId, format_position
from tests.unit.protocol.driver_bench import FOUR, Bench, at, name

AT = "net.py, line 7, in forward"


def _raise(bench: Bench, worker: str, fingerprint: str, step: int | None = 3) -> None:
    position = at(step) if step is not None else None
    fence = bench.fence if step is not None else None
    bench.on(WorkerRaised(worker, fence, position, fingerprint, f"Traceback\nValueError: {fingerprint}"))


def test_r13_the_same_exception_at_the_same_position_in_two_worlds_ends_the_job() -> None:
    """Another position or another exception does not."""
    bench = Bench.running(1, 2, 3, 4)
    for lost, print_, step in ((2, "row 17", 3), (4, "row 17", 4), (3, "row 18", 4)):
        _raise(bench, name(lost), print_, step)
        bench.restart(name(lost, 2))
        bench.regroup(step, *(worker for worker in bench.members() if worker != name(lost)))
        bench.wait(3.0, heartbeats_of=[1, 2, 3, 4])
        bench.form()
        assert not bench.find_commands(End)
    _raise(bench, bench.members()[0], "row 18", 4)
    assert bench.end.outcome is JobOutcome.USER_ERROR
    assert "ValueError: row 18" in bench.end.detail
    assert "step 4" in bench.end.reason


@pytest.mark.scenario("U1")
def test_r13_an_exception_of_every_member_ends_the_job_with_the_first() -> None:
    bench = Bench.running(1, 2, 3, failure_budget=1, all_results=True)
    for job, what in ((2, "row 17"), (1, "connection closed by peer"), (3, "connection closed by peer")):
        assert not bench.find_commands(End)
        _raise(bench, name(job), what, step=0)
    bench.check_end(JobOutcome.USER_ERROR, name(2))
    assert "ValueError: row 17" in bench.end.detail
    assert "all 3 workers of world 1 raised" in bench.end.reason


def _kill_worker(bench: Bench, world: int) -> None:
    bench.exit(name(3, world), -9)
    bench.restart(name(3, world + 1))


def _lose_slot(bench: Bench, world: int) -> None:
    bench.on(on.LaunchEnded(0, 2 + world, "its executor is lost"))
    bench.start_warm(3 + world)


def _raise_as_nccl(bench: Bench, worker: str) -> None:
    _raise(bench, worker, "NCCL", step=0)


def _abort_as_nccl(bench: Bench, worker: str) -> None:
    bench.exit(worker, -6, "killed by signal 6", crashed_at=AT)


@pytest.mark.parametrize("survivor_first", [True, False])
@pytest.mark.parametrize(("fails", "budget"), [(_raise_as_nccl, 1), (_abort_as_nccl, 3)])
@pytest.mark.parametrize("taken", [_kill_worker, _lose_slot])
def test_r13_failures_that_follow_a_lost_peer_do_not_end_the_job(
    taken: Callable[[Bench, int], None],
    fails: Callable[[Bench, str], None],
    budget: int,
    survivor_first: bool,
) -> None:
    """NCCL's errors read alike in each world, and a function is always at its beginning."""
    limits = replace(FOUR, num_workers=3, max_workers=3, cooldown_range=(0.1, 0.1))
    bench = Bench.running(1, 2, 3, limits=replace(limits, failure_budget=budget, all_results=True))
    for world, job, other in ((1, 2, name(1)), (2, 1, name(2, 2))):
        assert len(bench.members()) == 3
        if not survivor_first:
            taken(bench, world)
        fails(bench, name(job))
        if survivor_first:
            taken(bench, world)
        bench.join(other, bench.fence, None)
        bench.restart(name(job, 2))
        bench.wait(5.0, heartbeats_of=[1, 2, 3, 4, 5])
        bench.form()
        assert not bench.find_commands(End)
    fails(bench, name(2, 2))
    assert not bench.find_commands(End), "the first one that proves something"


def test_a_program_that_no_worker_can_load_ends_the_job() -> None:
    bench = Bench(max_workers=2, num_workers=2)
    for job in (1, 2):
        bench.slot(job)
    _raise(bench, name(1), "no module", step=None)
    assert not bench.find_commands(End)
    _raise(bench, name(2), "no module", step=None)
    assert bench.end.outcome is JobOutcome.USER_ERROR


def test_the_budget_is_for_failures_of_workers_within_the_window() -> None:
    bench = Bench.running(1, 2, failure_budget=2, failure_window=100.0, cooldown_range=(1.0, 1.0))
    for started in (1, 2):
        bench.exit(name(2, started), -11)
        bench.on(WorkerStarted(name(2, started + 1).slot, name(2, started + 1)))
    bench.wait(101.0, heartbeats_of=[1, 2])
    bench.exit(name(2, 3), 1)
    assert not bench.find_commands(End)
    for started in (4, 5):
        bench.on(WorkerStarted(name(2, started).slot, name(2, started)))
        bench.exit(name(2, started), 1)
    bench.check_end(JobOutcome.FAILURE_BUDGET, "failed 3 times within 100 s")


def test_memory_that_runs_out_again_and_again_ends_the_job_with_the_setting_to_raise() -> None:
    bench = Bench.running(1, 2, failure_window=100.0, cooldown_range=(1.0, 1.0))
    exits = [
        WorkerExited(SlotId("2-0"), name(2, started), -9, "out of memory", True) for started in (1, 2, 3, 4)
    ]
    bench.on(exits[0])
    bench.wait(101.0, heartbeats_of=[1, 2])
    for started, event in enumerate(exits[1:], 2):
        assert not bench.find_commands(End)
        bench.on(WorkerStarted(name(2, started).slot, name(2, started)))
        bench.on(event)
    bench.check_end(
        JobOutcome.OUT_OF_MEMORY, "ran out of memory 3 times within 100 s", "spark.executor.memoryOverhead"
    )


@pytest.mark.scenario("U1")
def test_lost_hosts_and_drains_cost_no_budget() -> None:
    bench = Bench.running(1, 2, 3, 4, failure_budget=0)
    bench.on(on.HostLost(0, "h2", "executor lost"))
    bench.exit(name(2), -9)
    bench.on(on.LaunchEnded(0, 3, "task failed"))
    bench.on(on.DrainRequested(0, "decommissioning", host="h4"))
    bench.regroup(3, name(1), name(4))
    bench.exit(name(4), 0)
    assert not bench.find_commands(End)


def test_r21_a_program_that_raises_before_it_joins_costs_those_who_train_nothing() -> None:
    bench = Bench.running(1, 2, 3, failure_budget=1)
    bench.slot(4)
    for started in (1, 2, 3):
        bench.on(WorkerStarted(name(4, started).slot, name(4, started)))
        _raise(bench, name(4, started), "no such file", step=None)
        assert name(4, started) in bench.state.workers.departed
    assert not bench.find_commands(End)


def test_a_report_and_the_exit_that_follows_are_one_failure() -> None:
    bench = Bench.running(1, 2, 3, 4, failure_budget=1)
    _raise(bench, name(2), "row 17")
    bench.exit(name(2), 1)
    assert not bench.find_commands(End)
    bench.on(on.ConnectionLost(0, SlotId("3-0"), name(3)))  # whose exit is reported later
    bench.join(name(1), bench.fence, at(3), suspects=(name(3),))
    assert name(3) not in bench.state.workers
    assert not bench.find_commands(End)
    bench.exit(name(3), -11)
    assert bench.end.outcome is JobOutcome.FAILURE_BUDGET


BORNE = FOUR.driver_timeout


def _break_in_vain(bench: Bench, step: int | None = 3, seconds: float = BORNE) -> None:
    """All members come back to the same position; an operation was not asked for by rank 1."""
    bench.wait(seconds, heartbeats_of=[1, 2, 3])
    fence = bench.fence
    position = at(step) if step is not None else None
    for worker in bench.members():
        bench.join(worker, fence, position, reason="'loss' waited too long for rank(s) 1")
    if not bench.find_commands(End):
        bench.form()


@pytest.mark.parametrize("step", [3, 0, None])
def test_r13_worlds_without_progress_end_the_job_with_the_workers_own_reason(step: int | None) -> None:
    bench = Bench.running(1, 2)
    before = 0
    if step:
        _break_in_vain(bench, step)  # after progress
        before = 1
    for _ in range(2):
        _break_in_vain(bench, step)
        assert not bench.find_commands(End)
    _break_in_vain(bench, step)
    bench.check_end(
        JobOutcome.USER_ERROR,
        f"3 worlds in a row, up to world {before + 3}",
        f"broke at {format_position(None if step is None else at(step))} although",
        "'loss' waited too long for rank(s) 1",
    )


def test_progress_a_loss_and_a_newcomer_each_restart_the_count_of_worlds_without_progress() -> None:
    bench = Bench.running(1, 2)
    for step in (3, 3, 3, 4, 4, 4):  # the first at each step broke after progress
        _break_in_vain(bench, step)
    bench.start_warm(3)  # a planned change
    bench.wait(1.0, heartbeats_of=[1, 2, 3])
    bench.stop_planned(4, name(1), name(2))
    assert len(bench.members()) == 3
    bench.form()
    for _ in range(2):
        _break_in_vain(bench, 4)
    bench.on(on.HostLost(0, "h3", "executor lost"))
    bench.regroup(4, name(1), name(2))
    bench.form()
    for _ in range(2):
        _break_in_vain(bench, 4)
    assert not bench.find_commands(End)


def test_worlds_that_break_for_up_to_driver_timeout_do_not_end_the_job() -> None:
    bench = Bench.running(1, 2)
    for _ in range(10):
        _break_in_vain(bench, 0, seconds=BORNE / 10)
    assert not bench.find_commands(End)
    _break_in_vain(bench, 0, seconds=BORNE / 5)
    assert "11 worlds in a row" in bench.end.reason


def _crash(bench: Bench, worker: str, at: str = AT) -> None:
    bench.exit(worker, -11, "killed by signal 11", crashed_at=at)


def _crash_and_come_back(bench: Bench, job: int, *others: int, at: str = AT) -> None:
    """The first worker of that slot crashes in the world's first step; the slot's next one is a newcomer."""
    _crash(bench, name(job), at)
    for other in others:
        bench.join(name(other), bench.fence, None)
    bench.restart(name(job, 2))
    bench.wait(2.0, heartbeats_of=[job, *others])
    bench.form()


@pytest.mark.parametrize(
    ("job", "others", "first", "second", "ends"),
    [
        (2, [1], AT, name(1), True),
        (2, [1], "net.py, line 9, in forward", name(1), False),
        (2, [1], AT, name(2, 2), False),  # one host of several
        (1, [], AT, name(1, 2), True),  # the only host
    ],
)
def test_r13_native_code_that_crashes_at_one_place_on_all_hosts_ends_the_job(
    job: int, others: list[int], first: str, second: WorkerId, ends: bool
) -> None:
    size = 1 + len(others)
    bench = Bench.running(
        *sorted([job, *others]),
        num_workers=size,
        max_workers=size,
        cooldown_range=(1.0, 1.0),
        all_results=True,
    )
    _crash_and_come_back(bench, job, *others, at=first)
    assert len(bench.members()) == size
    assert not bench.find_commands(End)
    _crash(bench, second)
    assert [end.outcome for end in bench.find_commands(End)] == [JobOutcome.USER_ERROR] * ends
    assert not ends or f"killed by signal 11 in {AT}" in bench.end.reason


ALL_TWO = replace(FOUR, num_workers=2, max_workers=2, cooldown_range=(1.0, 1.0), all_results=True)


def test_r13_a_crash_that_is_reported_after_its_broken_connection_counts() -> None:
    bench = Bench.running(1, 2, 3, limits=replace(ALL_TWO, num_workers=3, max_workers=3))
    for job, other in ((2, name(1)), (1, name(2, 2))):
        assert not bench.find_commands(End)
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0"), name(job)))
        bench.join(other, bench.fence, None, suspects=(name(job),))
        assert name(job) in bench.state.workers.departed
        _crash(bench, name(job))
        bench.restart(name(job, 2))
        bench.wait(2.0, heartbeats_of=[1, 2, 3])
        bench.join(name(3), bench.fence, None)
        bench.wait(2.0, heartbeats_of=[1, 2, 3])
        bench.form()
    assert bench.end.outcome is JobOutcome.USER_ERROR


def test_r13_a_forgotten_host_does_not_count_as_a_second_host() -> None:
    bench = Bench.running(1, 2, limits=ALL_TWO)
    _crash_and_come_back(bench, 2, 1)
    bench.on(on.ConnectionLost(0, SlotId("2-0"), name(2, 2)))
    bench.wait(bench.limits.reconnect_grace + 1.0, heartbeats_of=[1, 2])
    bench.on(on.HostLost(0, "h2", "Spark lost sight of it"))
    _crash(bench, name(2, 2))
    assert not bench.find_commands(End)


def test_r13_worlds_from_two_checkpoints_count_as_progress() -> None:
    """A job on one host, whose native code crashes now and then, comes further with each world, until it does not."""
    bench = Bench.running(1, num_workers=1, max_workers=1, cooldown_range=(1.0, 1.0))
    for started, step in ((1, 100), (2, 200), (3, 0)):
        assert not bench.find_commands(End)
        if step:
            written = Checkpoint(bench.fence, at(step), f"checkpoint-{step}", "digest")
            bench.on(CheckpointWritten(name(1, started), written))
        _crash(bench, name(1, started))
        bench.restart(name(1, started + 1))
        bench.wait(5.0, heartbeats_of=[1])
        bench.form()
    assert not bench.find_commands(End)
    _crash(bench, name(1, 4))
    bench.check_end(JobOutcome.USER_ERROR, f"in 2 worlds that began at {format_position(at(200))}")


@pytest.mark.parametrize("trains", [False, True])
def test_r13_crashes_before_a_world_end_the_job_unless_others_train(trains: bool) -> None:
    """Once all slots had it twice."""
    bench = Bench(num_workers=1 if trains else 2, cooldown_range=(1.0, 1.0))
    if trains:
        bench.start(1)
    for job in (2, 3):
        bench.slot(job)
    for started in (1, 2):
        for job in (2, 3):
            assert not bench.find_commands(End)
            _crash(bench, name(job, started))
            bench.on(WorkerStarted(name(job, started + 1).slot, name(job, started + 1)))
    assert [("on all 2 slots" in end.reason) for end in bench.find_commands(End)] == [True] * (not trains)


def _lose_link(bench: Bench, step: int = 3) -> None:
    """The second member hears nothing of the first one, and both come back."""
    bench.wait(BORNE, heartbeats_of=[1, 2, 3])
    fence, (first, second) = bench.fence, bench.members()[:2]
    bench.join(second, fence, at(step), suspects=(first,), reason="receive timed out")
    for worker in bench.members():
        if worker != second:
            bench.join(worker, fence, at(step))


def test_r13_a_member_that_cannot_reach_another_one_is_left_out_and_returns_later() -> None:
    bench = Bench.running(1, 2, 3)
    _lose_link(bench)
    bench.form()
    for _ in range(2):
        _lose_link(bench)
        bench.form()
    assert len(bench.members()) == 3
    _lose_link(bench)
    assert bench.members() == [name(1), name(3)]
    assert "machines h1 and h2 could not reach each other, in 3 worlds in a row" in bench.world.reason
    bench.form()
    bench.restart(name(2, 2))
    bench.wait(BORNE / 2, heartbeats_of=[1, 2, 3])
    assert not bench.find_commands(AnnounceChange)
    bench.wait(BORNE, heartbeats_of=[1, 2, 3])
    assert bench.find_commands(AnnounceChange)


@pytest.mark.parametrize("cause", ["work", "min_workers", "again"])
def test_r13_worlds_without_progress_end_the_job_where_leaving_one_out_is_no_remedy(cause: str) -> None:
    bench = Bench.running(1, 2, 3, limits=replace(FOUR, min_workers=3) if cause == "min_workers" else FOUR)
    tries = 7 if cause == "again" else 4
    for _ in range(tries):
        if cause == "work":
            bench.on(on.WorkerStalled(0, name(1), bench.fence, "rank 0 has kept others waiting"))
        _lose_link(bench)
        if not bench.find_commands(End):
            bench.form()
    assert bench.end.outcome is JobOutcome.USER_ERROR
    assert len(bench.members()) == (2 if cause == "again" else 3)


def test_worlds_that_break_at_once_follow_one_another_more_and_more_slowly() -> None:
    bench = Bench.running(1, 2)
    for _ in range(100):
        _break_in_vain(bench, 0, seconds=0.1)
    assert 4 < bench.fence.generation < 8
    assert not bench.find_commands(End)
