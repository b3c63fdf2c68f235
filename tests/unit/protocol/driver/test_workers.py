"""R15 where the result of every member is needed: what `run` and the command line hand back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_elastic.protocol import commands as do
from spark_elastic.protocol.messages import Heartbeat, WorkerDone, WorkerRaised
from tests.unit.protocol.driver_bench import FOUR, Bench, at, name

WHOLE = replace(FOUR, all_results=True, cooldown_range=(1.0, 1.0))


def _finish(bench: Bench, *workers: str, step: int = 0) -> None:
    for worker in workers:
        bench.on(WorkerDone(worker, bench.fence, at(step), f"result of {worker}"))


def _raise(bench: Bench, worker: str, step: int | None = 0) -> None:
    position = at(step) if step is not None else None
    bench.on(WorkerRaised(worker, bench.fence, position, "print", "Traceback\nValueError: rank 1"))
    bench.exit(worker, 1)


def _replace(bench: Bench, job: int, started: int) -> str:
    """The slot's next worker comes."""
    worker = name(job, started)
    bench.restart(worker)
    bench.wait(1.1, heartbeats_of=[1, 2, 3, 4])
    return worker


def test_r15_the_job_waits_for_a_working_member_however_long_it_takes() -> None:
    bench = Bench.running(1, 2, 3, limits=WHOLE)
    _finish(bench, name(1), name(3))
    bench.start_warm(4)
    bench.wait(70.0, heartbeats_of=[1, 2, 3, 4])
    assert not bench.find_commands(do.End)
    assert not bench.find_commands(do.AnnounceChange), "those that are done would be called again"
    _finish(bench, name(2))
    assert bench.end.outcome is do.JobOutcome.SUCCESS
    assert bench.end.results == tuple(f"result of {name(job)}" for job in (1, 2, 3))


@pytest.mark.parametrize("first", [name(1), name(3)])
def test_r15_the_loss_of_a_member_without_result_makes_finished_members_regroup(first: str) -> None:
    bench = Bench.running(1, 2, 3, limits=WHOLE)
    _finish(bench, first)
    bench.exit(name(2), -9)
    (abort,) = bench.find_commands(do.AbortWorld)
    assert name(2) in abort.reason
    _finish(bench, *(worker for worker in (name(1), name(3)) if worker != first))
    assert not bench.find_commands(do.End), "a result of a world that is over does not count"
    assert bench.members() == [name(1), name(3)]
    assert bench.world.position == at(0)
    bench.form()
    _finish(bench, name(1))
    assert not bench.find_commands(do.End)
    _finish(bench, name(3))
    assert bench.end.results == (f"result of {name(1)}", f"result of {name(3)}")


def test_r15_a_member_lost_after_its_result_counts_as_done() -> None:
    bench = Bench.running(1, 2, 3, limits=WHOLE)
    _finish(bench, name(2))
    bench.exit(name(2), -9)
    assert not bench.find_commands(do.AbortWorld)
    _finish(bench, name(1), name(3))
    assert bench.end.results == tuple(f"result of {name(job)}" for job in (1, 2, 3))


@pytest.mark.parametrize("rank_0_first", [True, False])
def test_r15_an_exception_of_one_rank_is_retried_once_and_then_ends_the_job(rank_0_first: bool) -> None:
    bench = Bench.running(1, 2, limits=replace(WHOLE, num_workers=2, max_workers=2))
    if rank_0_first:
        _finish(bench, name(1))
    _raise(bench, name(2))
    if not rank_0_first:
        _finish(bench, name(1))
    assert len(bench.find_commands(do.PublishWorld)) == 1, "without that rank it would not show itself"
    newcomer = _replace(bench, 2, 2)
    assert bench.members() == [name(1), newcomer]
    bench.form()
    _finish(bench, name(1))
    _raise(bench, newcomer, None)  # it was told no position yet
    assert bench.end.outcome is do.JobOutcome.USER_ERROR
    assert bench.end.detail.endswith("ValueError: rank 1")


@pytest.mark.parametrize(
    ("cooldown", "step", "seconds"),
    [
        (1.0, 0, WHOLE.gather_timeout + 0.1),
        (60.0, 0, 0.0),  # its slot cools down for longer
        (1.0, 7, 0.0),  # in the middle of an elastic training
    ],
)
def test_r15_the_wait_for_a_rank_that_raised_is_limited(cooldown: float, step: int, seconds: float) -> None:
    bench = Bench.running(
        1, 2, limits=WHOLE, num_workers=2, max_workers=2, cooldown_range=(cooldown, cooldown)
    )
    _raise(bench, name(2), step)
    if step:
        bench.join(name(1), bench.fence, at(step))
    else:
        _finish(bench, name(1))
    assert len(bench.find_commands(do.PublishWorld)) == (1 if seconds else 2)
    bench.wait(seconds, heartbeats_of=[1, 2])
    assert bench.members() == [name(1)]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(5, do.JobOutcome.USER_ERROR), (0, do.JobOutcome.USER_ERROR), (1, None), (-11, None)],
)
def test_r13_a_code_that_the_function_chose_is_an_exception(code: int, outcome: do.JobOutcome | None) -> None:
    bench = Bench.running(1, 2, limits=replace(WHOLE, num_workers=2, max_workers=2))
    bench.exit(name(2), code)
    _finish(bench, name(1))
    newcomer = _replace(bench, 2, 2)
    bench.form()
    bench.exit(newcomer, code)
    assert [end.outcome for end in bench.find_commands(do.End)] == ([outcome] if outcome else [])
    said = f"{newcomer} ended in world 2 with exit code {code}, as worker {name(2)} "
    assert not outcome or said in bench.end.reason


def test_a_worker_that_raised_is_not_killed_while_its_process_ends() -> None:
    bench = Bench.running(1, 2, limits=WHOLE, num_workers=2, max_workers=2)
    bench.on(WorkerRaised(name(2), bench.fence, at(3), "print", "Traceback\nValueError: rank 1"))
    bench.on(Heartbeat(name(2).slot, name(2), "T"))
    stops = [stop.kill for stop in bench.find_commands(do.StopWorker) if stop.worker == name(2)]
    assert stops
    assert not any(stops)
    alone = Bench(WHOLE, num_workers=1, max_workers=1)
    alone.start(1)
    alone.exit(name(1), 0)  # ended by its function: it did not raise
    assert alone.end.reason == "the only worker of world 1 ended with exit code 0, at the beginning"


def test_r13_equal_exit_codes_with_progress_between_do_not_end_the_job() -> None:
    bench = Bench.running(1, 2, limits=replace(WHOLE, num_workers=2, min_workers=2, max_workers=2))
    bench.exit(name(2), 5)
    bench.join(name(1), bench.fence, at(7))
    newcomer = _replace(bench, 2, 2)
    assert bench.members() == [name(1), newcomer]
    bench.form()
    bench.exit(newcomer, 5)
    assert not bench.find_commands(do.End)


def test_a_world_that_breaks_since_a_member_returned_too_early_says_so() -> None:
    bench = Bench.running(1, 2, limits=WHOLE)
    _finish(bench, name(1))
    bench.join(name(2), bench.fence, at(0), suspects=(name(1),), reason="receive timed out")
    assert f"blames {name(1)} (which had returned its result): receive timed out" in bench.world.reason
