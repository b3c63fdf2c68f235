"""R18: which checkpoints count, what a world without survivors begins from, and when it may begin."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages as said
from spark_elastic.protocol.commands import PublishCheckpoint, PublishWorld
from spark_elastic.protocol.types import KEPT, Checkpoint, Fence, SlotId
from tests.unit.protocol.driver_bench import FOUR, Bench, at, name


def checkpoint(step: int, generation: int = 1, attempt: int = 1) -> Checkpoint:
    return Checkpoint(Fence(attempt, generation), at(step), f"{attempt}-{generation}-{step}", "digest")


def report_written(bench: Bench, step: int, generation: int = 1, attempt: int = 1) -> None:
    bench.on(said.CheckpointWritten(name(1), checkpoint(step, generation, attempt)))


def start_running() -> Bench:
    return Bench.running(1, 2, 3, 4, checkpoints_kept=2, gather_timeout=1.0)


def test_r18_the_newest_checkpoints_count_and_late_ones_change_nothing() -> None:
    bench = start_running()
    for step in (3, 6, 5, 9):
        report_written(bench, step)
    published = bench.find_commands(PublishCheckpoint)
    assert [[each.position.step for each in command.checkpoints] for command in published] == [
        [3],
        [6, 3],
        [9, 6],
    ]


SLOT = SlotId("2-0")
WORLD = Fence(1, 1)


@pytest.mark.parametrize(
    "message",
    [
        said.CheckpointStoreFull(name(1), 2),
        said.CheckpointStoreFull(name(2), 1),
        said.CheckpointWritten(name(1), checkpoint(9)),
        said.Heartbeat(SLOT, name(2), "S"),
        said.RegisterSlot(SlotId("2-1"), "h9", 2),
        said.RegisterSlot(SlotId("2-1"), "h9", 2, unfit="it has no GPU"),
        said.RequestNextWorld(name(2), WORLD, at(9), (name(3),), "its group broke"),
        said.WorkerDone(name(1), WORLD, at(9), "result"),
        said.WorkerExited(SLOT, name(2), -9),
        said.WorkerExited(SLOT, name(2), -11, "killed by signal 11", crashed_at="f"),
        said.WorkerRaised(name(2), WORLD, at(3), "print", "ValueError: wrong"),
        said.WorkerStarted(SLOT, name(2, 2)),
        said.WorkerStraggles(name(2), WORLD, "slow"),
        said.WorldFormed(name(2), WORLD),
    ],
)
def test_a_message_that_comes_twice_counts_once(message: said.DriverMessage) -> None:
    bench = Bench.running(1, 2, 3, 4, checkpoints_kept=4)
    for step in (1, 3, 6, 7):
        report_written(bench, step)
    bench.on(said.CheckpointStoreFull(name(1), 1))
    assert len(bench.state.checkpoints) == 3
    bench.on(message)
    once = bench.state
    bench.on(message)
    assert bench.state == once


def test_r18_a_checkpoint_of_another_attempt_or_a_future_world_never_counts() -> None:
    bench = start_running()
    report_written(bench, 3, attempt=2)
    report_written(bench, 3, generation=7)
    assert not bench.find_commands(PublishCheckpoint)


def test_r18_a_world_without_survivors_begins_from_the_newest_checkpoint() -> None:
    bench = start_running()
    report_written(bench, 3)
    report_written(bench, 6)
    for job in (1, 2, 3, 4):
        bench.exit(name(job), -9)
        bench.restart(name(job, 2))
    world = bench.find_commands(PublishWorld)[-1].world
    assert [each.position.step for each in world.resume] == [6, 3]
    assert (world.source, world.position, world.receivers) == (0, None, (0, 1, 2, 3))
    assert "continues from checkpoint 1-1-6" in world.reason


def keep(step: int, generation: int = 0, attempt: int = 1) -> Checkpoint:
    return Checkpoint(Fence(attempt, generation), at(step), f"{KEPT}h", "")


@pytest.mark.parametrize(
    ("kept", "source", "steps"),
    [
        ({}, 0, [6]),
        ({2: keep(5)}, 0, [6]),  # an older attempt's, or from before the checkpoint
        ({2: keep(5, generation=1)}, 0, [6]),
        ({2: keep(6, generation=1)}, 0, [6]),
        ({2: keep(7, generation=1), 3: keep(8, generation=1), 4: keep(8, generation=1)}, 2, [8, 6]),
        ({1: keep(9, generation=1), 3: keep(7, generation=2)}, 2, [7, 6]),
    ],
)
def test_r23_a_newer_kept_commit_counts(kept: dict[int, Checkpoint], source: int, steps: list[int]) -> None:
    bench = start_running()
    report_written(bench, 6)
    for job in (1, 2, 3, 4):
        bench.exit(name(job), -9)
        bench.on(on.LaunchEnded(bench.now, job, "its task ended"))
    for job in (5, 6, 7, 8):
        bench.on(said.RegisterSlot(SlotId(f"{job}-0"), f"h{job}", job, kept=kept.get(job - 4)))
        bench.on(said.WorkerStarted(SlotId(f"{job}-0"), name(job)))
        bench.join(name(job))
    world = bench.find_commands(PublishWorld)[-1].world
    assert [each.position.step for each in world.resume] == steps
    assert (world.source, world.receivers) == (source, (0, 1, 2, 3))
    assert ("as a host's memory has kept it" in world.reason) == (len(steps) == 2)


def test_r23_slots_that_outlive_their_workers_tell_what_their_host_has_kept_since() -> None:
    bench = start_running()
    report_written(bench, 3)
    for job in (1, 2, 3, 4):
        bench.exit(name(job), -9)
        kept = keep(8, generation=1) if job == 3 else None
        bench.on(said.WorkerStarted(SlotId(f"{job}-0"), name(job, 2), kept))
        bench.join(name(job, 2))
    world = bench.find_commands(PublishWorld)[-1].world
    assert ([each.position.step for each in world.resume], world.source) == ([8, 3], 2)


def test_r18_the_driver_waits_for_old_members_that_may_live() -> None:
    """Whoever was stopped may train on when it wakes up, until the driver's silence ends it."""
    bench = start_running()
    report_written(bench, 3)
    for _ in range(12):
        bench.wait(0.5)
        for job in (1, 2, 3, 4):
            bench.on(said.Heartbeat(SlotId(f"{job}-0"), name(job), "T"))
    assert not bench.state.workers
    for job in (1, 2, 3):
        bench.exit(name(job), -9)
    for job in (1, 2, 3):
        bench.restart(name(job, 2))
    bench.wait(2.0, heartbeats_of=[1, 2, 3])
    assert len(bench.find_commands(PublishWorld)) == 1, "a world while one of the old may be training"
    bench.on(on.LaunchEnded(0, 4, "its executor was lost"))
    assert bench.find_commands(PublishWorld)[-1].world.resume == (checkpoint(3),)


def disconnect_all(bench: Bench, failed: bool = False) -> None:
    """Of some the worker's connection is seen to end, of others their slot task's."""
    for job in (1, 2, 3, 4):
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0"), name(job) if job % 2 else None, failed))


def disconnect_late(bench: Bench) -> None:
    """The kernel gives up the connections of a host that is cut off, too, only later."""
    bench.wait(25.0)
    disconnect_all(bench)


def reset_all(bench: Bench) -> None:
    disconnect_all(bench, failed=True)


def reset_one_of_two(bench: Bench) -> None:
    for job in (1, 2, 3, 4):
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0")))
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0"), name(job), reset=True))


def reconnect_one(bench: Bench) -> None:
    bench.on(on.ConnectionLost(0, SlotId("1-0"), name(1)))
    bench.on(on.ConnectionBack(0, SlotId("1-0"), name(1)))
    for job in (2, 3, 4):
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0")))


def stay_silent(bench: Bench) -> None:
    """The driver was cut off from all: they have ended themselves while Spark's own patience lasted."""
    bench.wait(FOUR.driver_timeout + 6.0)
    assert not bench.state.workers


WAIT = FOUR.driver_timeout  # until whoever may live has ended itself


@pytest.mark.parametrize(
    ("before", "after", "least", "most"),
    [
        (disconnect_all, None, 0, 2),  # an executor lost with its connections is dead
        (None, disconnect_all, 0, 2),
        (None, None, WAIT, WAIT + 10),  # one that Spark alone reports lost may train on
        (None, disconnect_late, WAIT - 30, WAIT + 10),  # a connection that timed out proves nothing
        (reset_all, None, WAIT - 1, WAIT + 10),  # nor one that the network resets
        (None, reset_all, WAIT - 1, WAIT + 10),
        (reset_one_of_two, None, 0, 2),  # the kernel closed the other
        (None, reset_one_of_two, 0, 2),
        (reconnect_one, None, WAIT - 10, WAIT + 10),  # who connects again is alive
        (stay_silent, None, 0, 2),
    ],
)
def test_r18_lost_executors_are_waited_for_unless_their_connections_prove_their_death(
    before: Callable[[Bench], None] | None, after: Callable[[Bench], None] | None, least: float, most: float
) -> None:
    """All four trained on at second 10; Spark lost their executors, and new workers come."""
    bench = start_running()
    bench.wait(10.0, heartbeats_of=[1, 2, 3, 4])
    if before is not None:
        before(bench)
    for job in (1, 2, 3, 4):
        bench.on(on.HostLost(0, f"h{job}", "its executor is lost"))
        bench.on(on.LaunchEnded(0, job, "its executor is lost", executor_lost=True))
    if after is not None:
        after(bench)
    worlds, begun = len(bench.find_commands(PublishWorld)), bench.now
    bench.start_warm(5, 6, 7, 8)
    while len(bench.find_commands(PublishWorld)) == worlds and bench.now < begun + 100.0:
        bench.wait(0.5, heartbeats_of=[5, 6, 7, 8])
    assert least <= bench.now - begun < most
