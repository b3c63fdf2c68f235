"""Who is in a world, at which rank, and how long a member is waited for that does not come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import AbortWorld, End, JobOutcome, NotifyUser, PublishWorld, StopWorker
from spark_elastic.protocol.driver import forming
from spark_elastic.protocol.driver.state import WorkerRecord
from spark_elastic.protocol.messages import WorldFormed
from spark_elastic.protocol.types import Limits, Position
from tests.unit.protocol.driver_bench import FOUR, Bench, at, name


def _workers(spec: str) -> list[WorkerRecord]:
    """ "A5 b5": A at step 5, b the same but draining; "N": a newcomer."""
    return [
        WorkerRecord(
            word[0],
            f"s{word[0]}",
            "h",
            0.0,
            position=at(int(word[1:])) if word[1:] else None,
            draining="asked" if word[0].islower() else "",
        )
        for word in spec.split()
    ]


@pytest.mark.parametrize(
    ("survivors", "newcomers", "least", "most", "chosen"),
    [
        ("A5 B5", "N O", 1, 4, "ABNO"),
        ("A5 b5", "", 1, 4, "A"),  # who drains leaves
        ("A5 b5", "", 2, 4, "Ab"),  # unless it is needed
        ("A5 b5", "N", 2, 4, "AN"),
        ("a5", "", 1, 4, "a"),  # no worker could take its state
        ("a5", "N", 1, 4, "aN"),  # it hands its state on first
        ("a5 b5", "N O", 1, 2, "aN"),  # and makes room
        ("a5 B4", "", 1, 4, "aB"),  # the newest state is kept
        ("A5 b5 C5", "N", 1, 3, "ACN"),  # order of rank
        ("A5", "N", 1, 1, "A"),
    ],
)
def test_survivors_come_first(survivors: str, newcomers: str, least: int, most: int, chosen: str) -> None:
    limits = Limits(num_workers=most, min_workers=least, max_workers=most)
    found = forming.choose_members(_workers(survivors), _workers(newcomers), limits)
    assert "".join(worker.worker for worker in found) == chosen


def test_r08_a_world_is_no_larger_than_its_batch() -> None:
    limits = Limits(num_workers=4, min_workers=1, max_workers=4, max_global_batch=2)
    assert len(forming.choose_members([], _workers("N O P"), limits)) == 2


@pytest.mark.parametrize(
    ("machines", "local", "cross"),
    [
        ("a", [(0, 1)], [(0, 1)]),
        ("aab", [(0, 2), (1, 2), (0, 1)], [(0, 2), (0, 1), (1, 2)]),
        ("aba", [(0, 2), (0, 1), (1, 2)], [(0, 2), (1, 2), (0, 1)]),
        ("abb", [(0, 1), (0, 2), (1, 2)], [(0, 2), (1, 2), (0, 1)]),
        ("aabb", [(0, 2), (1, 2)] * 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("abcabc", [(0, 2)] * 3 + [(1, 2)] * 3, [(0, 3), (1, 3), (2, 3)] * 2),
    ],
)
@pytest.mark.scenario("U1")
def test_local_and_cross_ranks_follow_the_machines(
    machines: str, local: list[tuple[int, int]], cross: list[tuple[int, int]]
) -> None:
    """Executors of one machine share its local ranks."""
    workers = [WorkerRecord(f"w{i}", f"s{i}", f"executor {i}", 0.0) for i in range(len(machines))]
    members = forming.assign_ranks(workers, {w.worker: m for w, m in zip(workers, machines, strict=True)})
    assert [m.rank for m in members] == list(range(len(machines)))
    assert [m.host for m in members] == [w.host for w in workers], "shared memory is an executor's"
    assert [(m.local_rank, m.local_size) for m in members] == local
    assert [(m.cross_rank, m.cross_size) for m in members] == cross


@pytest.mark.parametrize(
    ("staying", "joining", "ranked"),
    [
        ("", "a1 b1 a2 b2", "a1 a2 b1 b2"),  # the first world
        ("a1 b1", "b2 a2", "a1 a2 b1 b2"),
        ("a1 b1 a2", "a3 b2", "a1 b1 b2 a2 a3"),  # survivors keep their order
        ("b1", "a1 b2 c1 a2", "b1 b2 a1 a2 c1"),  # rank 0 is a survivor
        ("a1 b1", "", "a1 b1"),
    ],
)
def test_newcomers_come_behind_the_members_of_their_machine(staying: str, joining: str, ranked: str) -> None:
    workers = [
        [WorkerRecord(w, f"slot {w}", "h", 0.0) for w in group.split()] for group in (staying, joining)
    ]
    machines = {w.worker: w.worker[0] for group in workers for w in group}
    assert " ".join(w.worker for w in forming.group_by_machine(*workers, machines)) == ranked


@pytest.mark.parametrize(
    ("positions", "source"),
    [([None, None], None), ([at(3), at(3), None], 0), ([at(3), at(4), at(4)], 1), ([None, at(0)], 1)],
)
def test_r04_the_source_is_lowest_of_newest(positions: list[Position | None], source: int | None) -> None:
    workers = [WorkerRecord(f"w{i}", f"s{i}", "h", 0.0, position=p) for i, p in enumerate(positions)]
    assert forming.find_source(workers) == source


SHORT = replace(FOUR, regroup_timeout=4.0, driver_timeout=8.0)


def _find_killed(bench: Bench) -> set[str]:
    return {stop.worker for stop in bench.find_commands(StopWorker) if stop.kill}


@pytest.mark.parametrize("comes", [True, False])
def test_the_last_member_with_the_state_is_evicted_after_ten_regroup_timeouts(comes: bool) -> None:
    bench = Bench.running(1, 2, 3, limits=SHORT)
    bench.exit(name(3), -9)
    bench.join(name(2), bench.fence, None)  # it had not taken the state yet
    bench.wait(SHORT.regroup_timeout * forming.LAST_STATE_FACTOR - 0.1, heartbeats_of=[1, 2])
    assert not _find_killed(bench)
    if comes:
        bench.regroup(7, name(1))
        assert (bench.members(), bench.world.position) == ([name(1), name(2)], at(7))
        return
    bench.wait(0.2, heartbeats_of=[1, 2])
    assert _find_killed(bench) == {name(1)}


def test_a_member_that_works_on_is_evicted_after_regroup_timeout_if_another_came_with_the_state() -> None:
    bench = Bench.running(1, 2, limits=SHORT)
    bench.join(name(2), bench.fence, at(7), suspects=(name(1),), reason="timed out after 60 s")
    bench.wait(SHORT.regroup_timeout - 0.1, heartbeats_of=[1, 2])
    assert not _find_killed(bench)
    bench.wait(0.2, heartbeats_of=[1, 2])
    assert _find_killed(bench) == {name(1)}
    assert bench.members() == [name(2)]


def test_building_a_world_has_its_own_bound() -> None:
    bench = Bench()
    bench.start_warm(1, 2, 3, 4)
    for job in (1, 2, 3):
        bench.on(WorldFormed(name(job), bench.fence))
    bench.wait(forming.SHORT_TIMEOUT + 0.1, heartbeats_of=[1, 2, 3, 4])
    (abort,) = bench.find_commands(AbortWorld)
    assert f"{name(4)} did not build world 1 within 30 s" in abort.reason


def _keep_rank_0_busy(bench: Bench, step: int) -> None:
    """It works for longer than the others wait in a collective, and than it is waited for after that."""
    zero, *others = bench.members()
    bench.on(on.WorkerStalled(0, zero, bench.fence, f"{zero} runs, last seen in evaluate (train.py:7)"))
    for worker in others:
        bench.join(worker, bench.fence, at(step), suspects=(zero,), reason="timed out after 60 s")
    bench.wait(SHORT.regroup_timeout + 0.1, heartbeats_of=[1, 2, 3])
    if bench.find_commands(End):
        return
    job, started = int(zero[0]), int(zero.rpartition(".")[2])
    bench.exit(zero, -9)
    bench.restart(name(job, started + 1))
    bench.form()


@pytest.mark.parametrize("moves", [False, True])
def test_r13_repeated_evictions_of_rank_0_at_one_position_end_the_job(moves: bool) -> None:
    bench = Bench.running(1, 2, 3, limits=replace(SHORT, num_workers=3, max_workers=3))
    for attempt in range(6):
        if not bench.find_commands(End):
            _keep_rank_0_busy(bench, 7 + attempt * moves)
    if moves:
        assert not bench.find_commands(End)
        return
    assert len(bench.find_commands(PublishWorld)) == 4
    assert bench.end.outcome is JobOutcome.USER_ERROR
    for words in ("step 7", "one did not come back", "timed out after 60 s", "evaluate (train.py:7)"):
        assert words in bench.end.reason
    assert "raise collective_timeout" in bench.end.reason


@pytest.mark.parametrize(
    ("least", "warm", "said"),
    [
        (1, True, "2 of 4 workers (num_workers) came within 5 s (gather_timeout): the job begins with them"),
        (3, True, "2 workers are there and 3 are needed (min_workers)"),
        (2, False, "2 more have started and import what the program needs"),  # it asks for no cores
    ],
)
def test_a_wait_for_workers_is_announced(least: int, warm: bool, said: str) -> None:
    bench = Bench(min_workers=least, gather_timeout=5.0)
    for job in (1, 2):
        bench.start_warm(job) if warm else bench.slot(job)
    bench.wait(6.0, heartbeats_of=[1, 2])
    (told,) = [notice.reason for notice in bench.find_commands(NotifyUser)]
    assert said in told


def test_a_wait_for_min_workers_is_announced_once_and_again_after_the_next_loss() -> None:
    bench = Bench(min_workers=2, gather_timeout=5.0)
    bench.wait(12.0)
    (told,) = [each.reason for each in bench.find_commands(NotifyUser)]
    assert told.startswith("0 workers are there and 2 are needed (min_workers)")
    assert "more cores, or lower min_workers" in told
    bench.start(1, 2, 3, 4)
    assert len(bench.find_commands(NotifyUser)) == 1
