"""`max_runtime` in the driver's machine."""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol import driver_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import AnnounceChange, DriverCommand, End, JobOutcome, PublishWorld
from spark_elastic.protocol.driver.forming import LAST_STOP_TIMEOUT
from spark_elastic.protocol.events import Received
from spark_elastic.protocol.messages import (
    Heartbeat,
    RegisterSlot,
    RequestNextWorld,
    WorkerExited,
    WorkerStarted,
    WorldFormed,
)
from spark_elastic.protocol.types import START, Fence, Limits, SlotId, WorkerId
from tests.unit.protocol.driver_bench import FOUR, Bench, name

LIMITS = Limits(1, 1, 1, max_runtime=100.0)


class Driver:
    def __init__(self, limits: Limits = LIMITS) -> None:
        self.state, _ = driver_machine.initial(limits, 1)

    def say(self, event: on.DriverEvent) -> tuple[DriverCommand, ...]:
        self.state, commands = driver_machine.step(self.state, event)
        return commands

    def train(self) -> Driver:
        self.say(on.Tick(0.0))
        self.say(Received(1.0, RegisterSlot(SlotId("1-0"), "h", 1)))
        self.say(Received(1.0, WorkerStarted(SlotId("1-0"), WorkerId("1-0.1"))))
        said = self.say(Received(2.0, RequestNextWorld(WorkerId("1-0.1"), None, None, (), "warm", False)))
        assert any(isinstance(command, PublishWorld) for command in said)
        self.say(Received(2.0, WorldFormed(WorkerId("1-0.1"), Fence(1, 1))))
        return self

    def heartbeats(self, now: float) -> tuple[DriverCommand, ...]:
        said = self.say(Received(now, Heartbeat(SlotId("1-0"), WorkerId("1-0.1"), "R")))
        return (*said, *self.say(on.Tick(now)))


def list_outcomes(commands: tuple[DriverCommand, ...]) -> list[JobOutcome]:
    return [command.outcome for command in commands if isinstance(command, End)]


def test_max_runtime_ends_the_job_once_all_members_have_stopped() -> None:
    driver = Driver().train()
    assert not [c for c in driver.heartbeats(99.0) if isinstance(c, AnnounceChange)]
    said = (*driver.heartbeats(100.0), *driver.heartbeats(101.0))
    (announced,) = [c for c in said if isinstance(c, AnnounceChange)]
    assert "max_runtime" in announced.reason
    assert not list_outcomes(said)
    came = driver.say(
        Received(101.5, RequestNextWorld(WorkerId("1-0.1"), Fence(1, 1), START, (), "boundary", True))
    )
    assert list_outcomes(came) == [JobOutcome.TIME_LIMIT]


def test_a_job_that_reaches_no_step_boundary_ends_after_the_last_stop_timeout() -> None:
    driver = Driver().train()
    assert not any(
        list_outcomes(driver.heartbeats(100.0 + second)) for second in range(int(LAST_STOP_TIMEOUT))
    )
    assert list_outcomes(driver.heartbeats(100.0 + LAST_STOP_TIMEOUT)) == [JobOutcome.TIME_LIMIT]


def test_max_runtime_ends_a_job_without_a_world_at_once() -> None:
    driver = Driver()
    driver.say(on.Tick(5.0))
    assert not list_outcomes(driver.say(on.Tick(104.0)))
    assert list_outcomes(driver.say(on.Tick(105.0))) == [JobOutcome.TIME_LIMIT]


def test_a_job_without_max_runtime_does_not_end() -> None:
    driver = Driver(Limits(1, 1, 1)).train()
    assert not any(list_outcomes(driver.heartbeats(2.0 + 50.0 * second)) for second in range(100))


# ---- the end comes together with something else: it still needs a boundary that all know to be the last


def _start_two(most: int = 2) -> Bench:
    bench = Bench(replace(FOUR, num_workers=2, max_workers=most, max_runtime=100.0))
    bench.start(1, 2)
    return bench


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
    assert bench.find_commands(AnnounceChange)[-1].version.job_ends, (
        "a boundary that is not yet reached may be the last"
    )
    bench.stop_planned(50, name(1), name(2))  # the announcement may still have been on its way
    assert bench.members() == [name(1), name(2), name(3)]
    _check_planned_end(bench, 51, 1, 2, 3)


def test_a_loss_on_the_way_to_the_last_boundary_costs_no_checkpoint() -> None:
    bench = _start_two()
    bench.wait(101.0 - bench.now, heartbeats_of=[1, 2])
    bench.on(WorkerExited(name(2).slot, name(2), -9))
    assert not bench.find_commands(End)
    bench.regroup(50, name(1))
    assert bench.members() == [name(1)]
    _check_planned_end(bench, 51, 1)


def test_a_loss_just_before_the_time_is_up_costs_no_checkpoint() -> None:
    bench = _start_two()
    bench.wait(99.5 - bench.now, heartbeats_of=[1, 2])
    bench.on(WorkerExited(name(2).slot, name(2), -9))
    bench.wait(1.0, heartbeats_of=[1])
    bench.regroup(50, name(1))
    _check_planned_end(bench, 51, 1)


def test_a_loss_after_the_time_is_up_ends_a_job_without_resets_by_its_time() -> None:
    bench = Bench(replace(FOUR, num_workers=2, max_workers=2, max_runtime=100.0, reset_limit=0))
    bench.start(1, 2)
    bench.wait(101.0 - bench.now, heartbeats_of=[1, 2])
    bench.on(WorkerExited(name(2).slot, name(2), -9))
    bench.regroup(50, name(1))
    assert bench.end.outcome is JobOutcome.TIME_LIMIT
    assert "(max_runtime)" in bench.end.reason


def test_without_survivors_a_job_whose_time_is_up_ends_at_once() -> None:
    bench = _start_two()
    bench.wait(101.0 - bench.now, heartbeats_of=[1, 2])
    for job in (1, 2):
        bench.on(WorkerExited(name(job).slot, name(job), -9))
    assert bench.end.outcome is JobOutcome.TIME_LIMIT


def test_survivors_that_reach_no_step_boundary_are_ended_after_the_grace_period() -> None:
    bench = _start_two()
    bench.wait(101.0 - bench.now, heartbeats_of=[1, 2])
    bench.on(WorkerExited(name(2).slot, name(2), -9))
    bench.regroup(50, name(1))
    bench.form()
    bench.wait(LAST_STOP_TIMEOUT - 2.0, heartbeats_of=[1])
    assert not bench.find_commands(End)
    bench.wait(2.0, heartbeats_of=[1])
    assert bench.end.outcome is JobOutcome.TIME_LIMIT
