"""`max_runtime` in the driver's machine."""

from __future__ import annotations

from spark_elastic.protocol import driver_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import Announce, DriverCommand, End, Outcome, Publish
from spark_elastic.protocol.time_limit import GRACE
from spark_elastic.protocol.types import START, Fence, Limits

LIMITS = Limits(1, 1, 1, max_runtime=100.0)


class Driver:
    def __init__(self, limits: Limits = LIMITS) -> None:
        self.state, _ = driver_machine.initial(limits, 1)

    def say(self, event: on.DriverEvent) -> tuple[DriverCommand, ...]:
        self.state, commands = driver_machine.step(self.state, event)
        return commands

    def trains(self) -> Driver:
        self.say(on.Tick(0.0))
        self.say(on.SlotRegistered(1.0, "1-0", "h", 1))
        self.say(on.WorkerStarted(1.0, "1-0", "1-0.1"))
        said = self.say(on.WorkerJoins(2.0, "1-0.1", "1-0", None, None, (), "warm", False))
        assert any(isinstance(command, Publish) for command in said)
        self.say(on.WorkerFormed(2.0, "1-0.1", Fence(1, 1)))
        return self

    def beats(self, now: float) -> tuple[DriverCommand, ...]:
        said = self.say(on.SlotBeat(now, "1-0", "1-0.1", "R"))
        return (*said, *self.say(on.Tick(now)))


def ends(commands: tuple[DriverCommand, ...]) -> list[Outcome]:
    return [command.outcome for command in commands if isinstance(command, End)]


def test_it_is_announced_and_the_job_ends_once_all_have_come() -> None:
    driver = Driver().trains()
    assert not [c for c in driver.beats(99.0) if isinstance(c, Announce)]
    said = (*driver.beats(100.0), *driver.beats(101.0))
    (announced,) = [c for c in said if isinstance(c, Announce)]
    assert "max_runtime" in announced.reason
    assert not ends(said)
    came = driver.say(on.WorkerJoins(101.5, "1-0.1", "1-0", Fence(1, 1), START, (), "boundary", True))
    assert ends(came) == [Outcome.TIME_LIMIT]


def test_who_reaches_no_boundary_is_ended_after_the_grace() -> None:
    driver = Driver().trains()
    assert not any(ends(driver.beats(100.0 + second)) for second in range(int(GRACE)))
    assert ends(driver.beats(100.0 + GRACE)) == [Outcome.TIME_LIMIT]


def test_while_workers_are_gathered_it_ends_at_once() -> None:
    driver = Driver()
    driver.say(on.Tick(5.0))
    assert not ends(driver.say(on.Tick(104.0)))
    assert ends(driver.say(on.Tick(105.0))) == [Outcome.TIME_LIMIT]


def test_without_a_limit_nothing_ends() -> None:
    driver = Driver(Limits(1, 1, 1)).trains()
    assert not any(ends(driver.beats(2.0 + 50.0 * second)) for second in range(100))
