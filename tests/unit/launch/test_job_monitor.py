"""What workers print goes to the listener; what their slots have to say is a warning, whatever is shown."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from spark_elastic.driver.job_monitor import JobListener, JobMonitor
from spark_elastic.driver.journal import Journal
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import PublishWorld
from spark_elastic.protocol.driver.state import JobStage
from spark_elastic.protocol.messages import (
    DriverMessage,
    RegisterSlot,
    RequestNextWorld,
    WorkerExited,
    WorkerStarted,
)
from spark_elastic.protocol.types import SlotId, WorkerId
from spark_elastic.rendezvous.messages import SLOT_LINE_PREFIX, LogLines, Report
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
