"""Who keeps the others waiting is named once per world, in the log and to the machine; every event is handed on."""

from __future__ import annotations

import pytest

from spark_elastic.driver.stall_watch import SPARE_BEATS, StallWatch
from spark_elastic.protocol.events import DriverEvent, Received, WorkerStalled, is_heartbeat
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import Fence, Member, World
from spark_elastic.testing.fakes import FakeClock


def world(generation: int) -> World:
    members = tuple(
        Member(f"{rank}-0.1", f"{rank}-0", f"host-{rank}", rank, 0, 1, rank, 2, None) for rank in range(2)
    )
    return World(Fence(1, generation), members, None, "start")


class Stage:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.handed_on: list[DriverEvent] = []
        self.watch = StallWatch(self.handed_on.append, self.clock, 3.0, lambda slots: 1.0)

    def beat(self, rank: int, waits: bool, seconds: float) -> None:
        now = self.clock.now()
        self.watch.post(
            Received(now, Heartbeat(f"{rank}-0", f"{rank}-0.1", "S", waits, seconds, "f (a.py:1)"))
        )

    def pass_seconds(self, seconds: int) -> None:
        """Rank 0 waits for rank 1 all the while."""
        for second in range(1, seconds + 1):
            self.clock.advance(1.0)
            self.beat(1, False, float(second))
            self.clock.advance(0.3)
            self.beat(0, True, float(second))

    def stalled(self) -> list[WorkerStalled]:
        return [event for event in self.handed_on if isinstance(event, WorkerStalled)]


def test_a_stall_is_told_once_per_world(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    stage.pass_seconds(5)
    assert not stage.stalled(), "before there is a world nobody is late"
    stage.watch.world(world(1))
    stage.pass_seconds(2)
    assert not stage.stalled()
    stage.pass_seconds(8)
    (told,) = stage.stalled()
    assert (told.worker, told.fence) == ("1-0.1", Fence(1, 1))
    assert told.text in caplog.text
    assert sum(is_heartbeat(event) for event in stage.handed_on) == 30
    stage.watch.world(world(2))
    stage.pass_seconds(5)
    assert [event.fence.generation for event in stage.stalled()] == [1, 2]


def test_after_the_end_of_a_world_who_works_on_is_named() -> None:
    stage = Stage()
    stage.watch.world(world(1))
    stage.watch.over()
    for second in range(1, 6):
        stage.clock.advance(1.0)
        stage.beat(1, False, 10.0 + second)
    assert [event.worker for event in stage.stalled()] == ["1-0.1"]
    stage.watch.world(world(2))
    stage.clock.advance(5.0)
    stage.beat(1, False, 20.0)
    assert len(stage.stalled()) == 1


def test_beats_of_slots_that_are_gone_are_forgotten() -> None:
    stage = Stage()
    stage.watch.world(world(1))
    for number in range(10 * SPARE_BEATS):
        stage.beat(number, False, 0.0)
        stage.clock.advance(0.3)
    assert len(stage.watch._beats) < 2 * SPARE_BEATS
