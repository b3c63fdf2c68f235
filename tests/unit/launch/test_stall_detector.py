"""`StallDetector` names members that keep the others waiting, once per world: in the log and to the machine."""

from __future__ import annotations

import pytest

from spark_elastic.driver.job_monitor import MAX_OTHER_HEARTBEATS, StallDetector
from spark_elastic.protocol.driver.state import DriverState, JobStage
from spark_elastic.protocol.events import DriverEvent, Received, WorkerStalled
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import Fence, Limits, Member, SlotId, WorkerId, World
from spark_elastic.testing.fakes import FakeClock


def world(generation: int) -> World:
    members = tuple(
        Member(WorkerId(f"{rank}-0.1"), SlotId(f"{rank}-0"), f"host-{rank}", rank, 0, 1, rank, 2, None)
        for rank in range(2)
    )
    return World(Fence(1, generation), members, None, "start")


class DetectorUnderTest:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.posted: list[DriverEvent] = []
        self.detector = StallDetector(self.posted.append, 3.0, lambda slots: 1.0)
        self.state = DriverState(Limits(2, 1, 2), 1)

    def send_heartbeat(self, rank: int, waits: bool, seconds: float) -> None:
        now = self.clock.now()
        heartbeat = Heartbeat(SlotId(f"{rank}-0"), WorkerId(f"{rank}-0.1"), "S", waits, seconds, "f (a.py:1)")
        self.detector.on_transition(Received(now, heartbeat), (), self.state)

    def publish(self, generation: int) -> None:
        self.state.stage, self.state.timers.published_at = JobStage.RUNNING, self.clock.now()
        self.state.current.enter(world(generation))

    def break_world(self) -> None:
        self.state.stage, self.state.timers.leaving_since = JobStage.REGROUPING, self.clock.now()
        self.state.current.break_reason = "it broke"

    def pass_seconds(self, seconds: int) -> None:
        """Rank 0 waits for rank 1 all the while."""
        for second in range(1, seconds + 1):
            self.clock.advance(1.0)
            self.send_heartbeat(1, False, float(second))
            self.clock.advance(0.3)
            self.send_heartbeat(0, True, float(second))

    def list_stalls(self) -> list[WorkerStalled]:
        return [event for event in self.posted if isinstance(event, WorkerStalled)]


def test_a_stall_is_reported_once_per_world(caplog: pytest.LogCaptureFixture) -> None:
    stage = DetectorUnderTest()
    stage.pass_seconds(5)
    assert not stage.list_stalls(), "without a world no member can be late"
    stage.publish(1)
    stage.pass_seconds(2)
    assert not stage.list_stalls()
    stage.pass_seconds(8)
    (told,) = stage.list_stalls()
    assert (told.worker, told.fence) == ("1-0.1", Fence(1, 1))
    assert told.text in caplog.text
    stage.publish(2)
    stage.pass_seconds(5)
    assert [event.fence.generation for event in stage.list_stalls()] == [1, 2]


def test_a_member_that_works_on_after_the_end_of_its_world_is_named() -> None:
    stage = DetectorUnderTest()
    stage.publish(1)
    stage.break_world()
    for second in range(1, 6):
        stage.clock.advance(1.0)
        stage.send_heartbeat(1, False, 10.0 + second)
    assert [event.worker for event in stage.list_stalls()] == ["1-0.1"]
    stage.publish(2)
    stage.clock.advance(5.0)
    stage.send_heartbeat(1, False, 20.0)
    assert len(stage.list_stalls()) == 1


def test_the_detector_forgets_heartbeats_of_slots_that_are_gone() -> None:
    stage = DetectorUnderTest()
    stage.publish(1)
    for number in range(10 * MAX_OTHER_HEARTBEATS):
        stage.send_heartbeat(number, False, 0.0)
        stage.clock.advance(0.3)
    assert len(stage.detector._heartbeats) < 2 * MAX_OTHER_HEARTBEATS
