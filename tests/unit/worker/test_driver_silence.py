"""R12 (driver silence): a worker and a slot end after `driver_timeout` without an answer, not after twice that."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from spark_elastic.errors import DriverUnreachable
from spark_elastic.protocol.events import DriverSilent
from spark_elastic.protocol.messages import Admission, Heartbeat, HeartbeatReply, RegisterSlot, WorkerStarted
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    SLOT_LINE_PREFIX,
    SlotId,
    SlotIdentity,
    SlotSpec,
    WorkerId,
    heartbeat_interval,
)
from spark_elastic.rendezvous.client import RendezvousClient, TransportError
from spark_elastic.rendezvous.messages import LogLines, SlotCommands, WorkerUpdate
from spark_elastic.testing.fakes import FakeClock
from spark_elastic.worker import loop
from spark_elastic.worker.loop import DriverWatch
from spark_elastic.worker.slot_agent import SlotAgent
from spark_elastic.worker.stack_reader import StackSample

TIMEOUT = 8.0
SHORT = 0.4  # seconds before its end, a refused request has no time for another try


@pytest.fixture(autouse=True)
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RETRY_EVERY", 0.0)


class RefusingDriver:
    """A driver that answers once and then refuses connections."""

    def __init__(self, answer: WorkerUpdate | SlotCommands, clock: FakeClock) -> None:
        self._answer: Any = answer
        self._clock = clock
        self.at: float = clock.now()

    def last_answered_at(self) -> float:
        return self.at

    def ask(self, request: object, hold: float, within: float) -> Any:
        answer, self._answer = self._answer, None
        if answer is None:
            self._clock.advance(max(0.1, min(TIMEOUT, within) - SHORT))
            raise DriverUnreachable("refused")
        self.at = self._clock.now()
        self._clock.advance(3.0)
        return answer


def make_watch(driver: object, clock: FakeClock, **more: Any) -> DriverWatch:
    return DriverWatch(WorkerId("1-0.1"), cast("Any", driver), clock, TIMEOUT, **more)


def make_agent(driver: object, clock: FakeClock | None = None, timeout: float = TIMEOUT) -> SlotAgent:
    spec = SlotSpec(address="", key=b"", attempt=1, driver_timeout=timeout)
    identity = SlotIdentity(slot=SlotId("1-0"))
    return SlotAgent(spec, identity, b"", cast("Any", driver), clock or FakeClock())


def test_r12_a_worker_ends_one_timeout_after_the_drivers_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, events = FakeClock(), []
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)  # the user's program may do so
    monkeypatch.setattr(loop, "EXIT_GRACE", 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: watch.close() if code == 3 else None)

    def handle_event(event: object) -> int:
        events.append(event)
        return 3

    driver = RefusingDriver(WorkerUpdate(INITIAL_VERSION), clock)
    watch = make_watch(driver, clock)
    watch._watch(handle_event)
    (silent,) = events
    assert isinstance(silent, DriverSilent)
    assert silent.seconds == pytest.approx(silent.now - driver.at)
    assert TIMEOUT <= silent.seconds < 1.2 * TIMEOUT


@pytest.mark.parametrize("slot_hears", [False, True])
def test_r12_a_long_poll_that_is_held_is_no_silence(slot_hears: bool) -> None:
    """Other requests of the worker are answered meanwhile, or heartbeats of its slot."""
    clock, ends = FakeClock(), list[float]()
    heard = [0.0, 0.0]  # by the worker, by its slot

    def ask(request: object, hold: float, within: float) -> Any:
        clock.advance(within / 2)
        if clock.now() < 3 * TIMEOUT:
            heard[slot_hears] = clock.now()
        raise DriverUnreachable("held up")

    def handle_event(event: object) -> None:
        ends.append(clock.now())
        watch.close()

    driver = SimpleNamespace(ask=ask, last_answered_at=lambda: heard[0])
    watch = make_watch(driver, clock, slot_answered_at=lambda: heard[1])
    watch._watch(handle_event)
    assert ends[0] >= max(heard) + TIMEOUT > 3 * TIMEOUT


def test_r12_a_slot_ends_one_timeout_after_the_drivers_last_answer() -> None:
    clock = FakeClock()
    driver = RefusingDriver(SlotCommands(0), clock)
    agent = make_agent(driver, clock)
    agent._watch()
    assert TIMEOUT <= clock.now() - driver.at < 1.2 * TIMEOUT


@pytest.mark.parametrize("answers", [False, True], ids=["a failed request", "an answer that was there"])
def test_r12_the_time_in_which_a_process_was_stopped_is_no_silence(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = FakeClock(), []
    client = RendezvousClient("localhost:1", b"key", 1, clock, TIMEOUT)

    def wake_late(*_: object) -> list[float]:
        asked.append(clock.now())
        if len(asked) == 1:
            clock.advance(3600.0)
            if not answers:
                raise TransportError("timed out")
        return [1.0]

    monkeypatch.setattr(client, "_post", wake_late)
    monkeypatch.setattr(client._closing, "wait", clock.advance)
    client.ask(Heartbeat(SlotId("1-0")))
    assert len(asked) == (1 if answers else 2)
    assert clock.now() - client.last_answered_at() <= TIMEOUT


def test_an_error_of_the_machine_costs_a_slot_one_heartbeat() -> None:
    child, asked, lines = MagicMock(), list[float](), list[str]()
    errors = [OSError(errno.EMFILE, "Too many open files")] * 2 + [MemoryError()]

    def ask(request: object, *_: object, patience: float = 0.0) -> Any:
        if isinstance(request, LogLines):
            lines.extend(request.lines)
            return None
        asked.append(patience)
        return HeartbeatReply(0.01)

    def read_state() -> str:
        if errors:
            raise errors.pop(0)
        if len(asked) == 3:
            agent._closing.set()
        return "T"

    agent = make_agent(SimpleNamespace(ask=ask, last_answered_at=lambda: 0.0))
    child.state = read_state
    child.read_sample.return_value = StackSample(is_waiting=False, seconds=0.0, stack="")
    child.worker = WorkerId("1-0.1")
    agent._active, agent._heartbeat_every = child, 0.01
    agent._send_heartbeats()
    assert len(asked) == 4
    for lease, slots in ((5.0, 4), (5.0, 10_000), (30.0, 100)):
        assert 2 * heartbeat_interval(lease, slots) * max(1.0, asked[0] / 0.01) < lease
    agent._send_waiting_lines()
    assert lines == [
        f"{SLOT_LINE_PREFIX}a heartbeat was not sent: OSError: [Errno 24] Too many open files",
        f"{SLOT_LINE_PREFIX}a heartbeat was not sent: MemoryError: ",
    ]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread")]
)
def test_an_error_of_the_machine_ends_no_thread_that_listens_to_the_driver(error: Exception) -> None:
    clock, events = FakeClock(), []

    class FailingDriver(RefusingDriver):
        def ask(self, request: object, hold: float, within: float) -> Any:
            if not events:
                events.append(error)
                raise error
            return super().ask(request, hold, within)

    agent = make_agent(FailingDriver(SlotCommands(1, (), "enough"), clock), clock)
    agent._watch()
    agent._events.get()()
    assert agent._reason == "enough"
    events.clear()
    watch = make_watch(FailingDriver(WorkerUpdate(INITIAL_VERSION.next(job_ends=True)), clock), clock)
    watch._watch(lambda event: watch.close())
    assert watch.version.job_ends


def test_r12_a_registered_slot_waits_for_driver_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[type, float | None] = {}
    closed = threading.Event()

    def ask(request: object, hold: float = 0.0, within: float | None = None) -> Any:
        asked[type(request)] = within
        if isinstance(request, RegisterSlot):
            return Admission(accepted=True)
        if not isinstance(request, WorkerStarted):
            closed.wait(10.0)
        raise DriverUnreachable("no answer")

    driver = SimpleNamespace(ask=ask, last_answered_at=lambda: 0.0, close=closed.set)
    agent = make_agent(driver, timeout=600.0)
    monkeypatch.setattr(agent, "_start_child", MagicMock())
    with pytest.raises(DriverUnreachable):
        agent.run()
    assert asked[RegisterSlot] is None  # the client's own time
    assert asked[WorkerStarted] == pytest.approx(600.0)
