"""What the driver tells those who watch a job, and which members are named for keeping others waiting."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from spark_elastic.driver.job_monitor import (
    MAX_OTHER_HEARTBEATS,
    JobListener,
    JobMonitor,
    StallDetector,
    find_stalls,
)
from spark_elastic.driver.journal import Journal
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import PublishWorld
from spark_elastic.protocol.driver.state import DriverState, JobStage
from spark_elastic.protocol.events import DriverEvent, Received, WorkerStalled
from spark_elastic.protocol.messages import (
    DriverMessage,
    Heartbeat,
    RegisterSlot,
    RequestNextWorld,
    WorkerExited,
    WorkerStarted,
)
from spark_elastic.protocol.types import SLOT_LINE_PREFIX, Fence, Limits, Member, SlotId, WorkerId, World
from spark_elastic.rendezvous.messages import LogLines, Report
from spark_elastic.testing.fakes import FakeClock
from tests.simulator.invariants import stamp_event
from tests.unit.protocol.driver_bench import FOUR, Bench, name


class Listener(JobListener):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        self.heard.append(line)


def test_a_message_of_a_slot_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    clock, listener = FakeClock(), Listener()
    monitor = JobMonitor(listener, clock)
    monitor.on_lines(
        LogLines(
            SlotId("1-0"), WorkerId("1-0.1"), None, ("hello", f"{SLOT_LINE_PREFIX}memory will not do", "bye")
        )
    )
    assert listener.heard == ["hello", "bye"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == "memory will not do (slot 1-0)"


class FullDisk(Listener):
    room = 1

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        if len(self.heard) == self.room:
            raise OSError(28, "No space left on device")
        super().on_output(worker, rank, line)


def test_a_failing_listener_is_logged_once_until_it_recovers(caplog: pytest.LogCaptureFixture) -> None:
    clock, listener = FakeClock(), FullDisk()
    monitor = JobMonitor(listener, clock)
    monitor._ranks = {"1-0.1": 0}
    for room in (1, 2):
        listener.room = room
        monitor.on_lines(LogLines(SlotId("1-0"), WorkerId("1-0.1"), None, ("shown", "lost")))
        monitor.on_report(Report(WorkerId("1-0.1"), {"loss": 1.0}))  # which goes to others, too
        monitor.on_lines(LogLines(SlotId("1-0"), WorkerId("1-0.1"), None, ("lost",)))
        assert len(caplog.records) == room
    assert listener.heard == ["shown", "shown"]


def test_a_failing_observer_is_logged_once_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(JobListener):
        def on_output(self, worker: str, rank: int | None, line: str) -> None:
            raise ValueError("no such luck")

    clock, listener, other = FakeClock(), Listener(), Listener()
    monitor = JobMonitor(listener, clock, [Failing(), other])
    monitor.on_lines(LogLines(SlotId("1-0"), WorkerId("1-0.1"), None, ("one", "two")))
    assert listener.heard == other.heard == ["one", "two"]
    assert [record.message for record in caplog.records] == ["Failing failed"]


def test_the_listener_gets_a_loss_before_the_next_world() -> None:
    class BrokenWorldListener(Listener):
        def on_world_broken(self, reason: str) -> None:
            self.heard.append(reason)

    listener, bench = BrokenWorldListener(), Bench(replace(FOUR, num_workers=2, min_workers=2, max_workers=2))
    monitor = JobMonitor(listener, FakeClock())
    with monitor.notifier:
        for message in (
            *(RegisterSlot(SlotId(f"{job}-0"), f"h{job}", job) for job in (1, 2)),
            *(WorkerStarted(SlotId(f"{job}-0"), name(job)) for job in (1, 2)),
            *(RequestNextWorld(name(job), None, None) for job in (1, 2)),
            WorkerExited(name(1).slot, name(1), -9, "killed by signal 9"),
        ):
            monitor.on_transition(stamp_event(message, bench.now), bench.on(message), bench.state)
    (reason,) = listener.heard
    assert name(1) in reason
    assert "killed by signal 9" in reason


def test_r17_the_scheduler_hook_gets_whether_slots_are_missing() -> None:
    clock, heard = FakeClock(), list[bool]()
    monitor = JobMonitor(JobListener(), clock, scheduler=SimpleNamespace(report_shortage=heard.append))
    bench = Bench(replace(FOUR, num_workers=2, min_workers=2, max_workers=2))

    def play(played: on.DriverEvent | DriverMessage) -> None:
        monitor.on_transition(stamp_event(played, bench.now), bench.on(played), bench.state)

    play(on.Tick(0))
    for job in (1, 2, 3):
        play(RegisterSlot(SlotId(f"{job}-0"), f"h{job}", job))
    assert heard == [True, False]
    for job in (1, 2):
        play(WorkerStarted(SlotId(f"{job}-0"), name(job)))
        play(RequestNextWorld(name(job), None, None))
    play(WorkerExited(name(1).slot, name(1), -9))
    assert bench.state.stage is JobStage.REGROUPING
    assert heard == [True, False], "the slot starts another worker"
    play(on.LaunchEnded(0, 1, "executor lost", executor_lost=True))
    play(on.Tick(0))
    assert heard == [True, False, True]


def test_r17_a_failing_scheduler_costs_no_monitor_nor_next_call(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    def fail(name: str) -> None:
        called.append(name)
        raise ValueError("the queue is broken")

    scheduler = SimpleNamespace(
        finish_gathering=lambda: fail("gathered"), report_shortage=lambda missing: fail(f"missing: {missing}")
    )
    monitor = JobMonitor(JobListener(), FakeClock(), scheduler=scheduler)
    journal = Journal(listener=monitor.on_transition)
    bench = Bench(replace(FOUR, num_workers=1, max_workers=1))
    with monitor.notifier:
        for event in (
            RegisterSlot(SlotId("1-0"), "h1", 1),
            WorkerStarted(SlotId("1-0"), name(1)),
            RequestNextWorld(name(1), None, None),
            on.HostLost(0, "h1", "executor lost"),
        ):
            stamped = stamp_event(event, bench.now)
            journal.record(stamped, bench.on(stamped), bench.state)
    assert called == ["gathered", "missing: True"]
    assert [change.size for change in monitor.history.build_report().world_changes] == [1]
    assert len(caplog.records) == 2


def test_the_log_has_the_reason_of_each_world_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "spark_elastic")
    bench = Bench.running(1, 2, limits=FOUR)
    monitor = JobMonitor(JobListener(), FakeClock())
    monitor.on_transition(on.Tick(1.0), bench.find_commands(PublishWorld), None)
    assert caplog.messages == [bench.world.reason]


# ---- stalls, by heartbeats alone


NOW, AFTER = 100.0, 3.0


def member(rank: int) -> Member:
    return Member(WorkerId(f"{rank}-0.1"), SlotId(f"{rank}-0"), f"host-{rank}", rank, 0, 1, rank, 3, None)


WORLD = World(Fence(1, 1), (member(0), member(1), member(2)), None, "start")
Sign = tuple[str, bool, float]
WAITING: Sign = ("S", True, 4.0)


def find(
    *signs: Sign | None, began: float = 0.0, at: float = NOW - 0.5, ended_at: float | None = None
) -> list[WorkerStalled]:
    """signs: (state, waits, seconds) of each rank's newest heartbeat."""
    heartbeats = {
        f"{rank}-0": (at, Heartbeat(SlotId(f"{rank}-0"), WorkerId(f"{rank}-0.1"), *sign, "f (a.py:1)"))
        for rank, sign in enumerate(signs)
        if sign is not None
    }
    return find_stalls(WORLD, heartbeats, NOW, AFTER, began, 1.0, ended_at)


@pytest.mark.parametrize(
    ("sign", "how"),
    [
        (("T", False, 4.0), "its process is stopped (T), last seen in f (a.py:1)"),
        (("T", True, 4.0), "its process is stopped (T)"),  # in the middle of an exchange
        (("R", False, 4.0), "its process runs (R), last seen in f (a.py:1)"),
        (("D", False, 4.0), "its process waits for a device (D)"),
        (("I", False, 4.0), "its process is in state I"),
        (None, "its slot has been silent for 100.0 s"),
    ],
)
def test_the_member_that_the_others_wait_for_is_named(sign: Sign | None, how: str) -> None:
    (stall,) = find(WAITING, sign, WAITING)
    assert stall.text.startswith("rank 1 (worker 1-0.1, host host-1) has kept others waiting for 4.0 s: ")
    assert how in stall.text


def test_a_member_that_works_on_in_a_world_that_is_over_is_named_although_no_member_waits() -> None:
    signs: tuple[Sign | None, ...] = (("S", False, 50.0), None, ("Z", False, 50.0))
    assert not find(*signs)
    assert not find(*signs, ended_at=NOW - 2.9)
    (stall,) = find(*signs, ended_at=NOW - 4.0)
    assert stall.text.startswith(
        "rank 0 (worker 0-0.1, host host-0) has kept others waiting for 4.0 s: its process"
    )


WORKS: Sign = ("R", False, 50.0)


@pytest.mark.parametrize(
    ("signs", "when", "named"),
    [
        ((("T", False, 9.0), WAITING, ("R", False, 4.0)), {}, [0, 2]),
        ((("S", True, 2.9), WORKS, ("S", True, 2.9)), {}, []),  # none has waited for long
        ((WORKS, WORKS, WORKS), {}, []),
        ((WAITING, WORKS, ("R", False, 0.2)), {}, [1]),  # one has just begun to work
        ((WAITING, WAITING, WAITING), {}, []),
        (
            (("S", True, 60.0), ("R", False, 2.0), ("S", True, 60.0)),
            {"began": NOW - 2.0},
            [],
        ),  # before the world
        ((("T", True, 60.0), WORKS, WORKS), {}, []),  # a stopped member does not wait
        ((WAITING, WAITING, WAITING), {"at": NOW - 30.0}, []),  # nor one of a silent slot
    ],
)
def test_members_that_others_have_long_waited_for_are_named(
    signs: tuple[Sign, ...], when: dict[str, float], named: list[int]
) -> None:
    assert [int(stall.worker[0]) for stall in find(*signs, **when)] == named


def test_heartbeats_about_an_earlier_worker_do_not_count() -> None:
    heartbeats = {
        f"{rank}-0": (NOW, Heartbeat(SlotId(f"{rank}-0"), WorkerId(f"{rank}-0.1"), *WAITING))
        for rank in range(3)
    }
    heartbeats["1-0"] = (NOW, Heartbeat(SlotId("1-0"), WorkerId("1-0.0"), "R", False, 50.0, "f (a.py:1)"))
    assert not find_stalls(WORLD, heartbeats, NOW, AFTER, 0.0, 1.0)


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
        self.state.current.enter(replace(WORLD, fence=Fence(1, generation)))

    def break_world(self) -> None:
        self.state.stage, self.state.timers.leaving_since = JobStage.REGROUPING, self.clock.now()
        self.state.current.break_reason = "it broke"

    def pass_seconds(self, seconds: int) -> None:
        """Ranks 0 and 2 wait for rank 1 all the while."""
        for second in range(1, seconds + 1):
            self.clock.advance(1.0)
            self.send_heartbeat(1, False, float(second))
            self.clock.advance(0.3)
            for rank in (0, 2):
                self.send_heartbeat(rank, True, float(second))

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
