"""R12 (driver silence): a worker and a slot end after `driver_timeout` without an answer, not after twice that."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from spark_elastic.errors import DriverUnreachable
from spark_elastic.protocol.events import DriverSilent
from spark_elastic.protocol.messages import Admission, Heartbeat, HeartbeatReply, RegisterSlot, WorkerStarted
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    SlotId,
    SlotIdentity,
    SlotSpec,
    WorkerId,
    heartbeat_interval,
)
from spark_elastic.rendezvous.client import RendezvousClient, TransportError
from spark_elastic.rendezvous.messages import SLOT_LINE_PREFIX, LogLines, SlotCommands, WorkerUpdate
from spark_elastic.testing.fakes import FakeClock
from spark_elastic.worker import loop
from spark_elastic.worker.loop import DriverWatch
from spark_elastic.worker.slot_agent import SlotAgent
from spark_elastic.worker.stack_sampler import StackSample

TIMEOUT = 8.0
SHORT = 0.4  # seconds before its end, a refused request has no time for another try


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
    watch = DriverWatch("1-0.1", cast("Any", driver), clock, TIMEOUT)
    watch._watch(handle_event)
    (silent,) = events
    assert isinstance(silent, DriverSilent)
    assert silent.seconds == pytest.approx(silent.now - driver.at)
    assert TIMEOUT <= silent.seconds < 1.2 * TIMEOUT


def test_r12_a_long_poll_that_is_held_is_no_silence() -> None:
    """Answers to the slot's heartbeats arrive meanwhile."""
    clock, ends = FakeClock(), []

    def handle_event(event: object) -> None:
        ends.append(clock.now())
        watch.close()

    class SlowRefusingDriver(RefusingDriver):
        def ask(self, request: object, hold: float, within: float) -> Any:
            clock.advance(within / 2)
            if not ends and clock.now() < 3 * TIMEOUT:
                self.at = clock.now()
            raise DriverUnreachable("held up")

    driver = SlowRefusingDriver(WorkerUpdate(INITIAL_VERSION), clock)
    watch = DriverWatch("1-0.1", cast("Any", driver), clock, TIMEOUT)
    watch._watch(handle_event)
    assert ends[0] >= driver.at + TIMEOUT > 3 * TIMEOUT


def test_r12_a_slot_ends_one_timeout_after_the_drivers_last_answer() -> None:
    clock = FakeClock()
    driver = RefusingDriver(SlotCommands(0), clock)
    spec = SlotSpec(address="", key=b"", attempt=1, driver_timeout=TIMEOUT)
    identity = SlotIdentity(slot=SlotId("1-0"))
    agent = SlotAgent(spec, identity, b"", cast("RendezvousClient", driver), clock)
    agent._watch()
    assert TIMEOUT <= clock.now() - driver.at < 1.2 * TIMEOUT


@pytest.mark.parametrize("answers", [False, True], ids=["a failed request", "an answer that was there"])
def test_r12_the_time_in_which_a_process_was_stopped_is_no_silence(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = FakeClock(), []
    client = RendezvousClient("localhost:1", b"key", 1, clock, TIMEOUT)

    def wake_late(*_: object) -> dict[str, Any]:
        asked.append(clock.now())
        if len(asked) == 1:
            clock.advance(3600.0)
            if not answers:
                raise TransportError("timed out")
        return {"reply": {"heartbeat_interval": 1.0}}

    monkeypatch.setattr(client, "_post", wake_late)
    monkeypatch.setattr(client._closing, "wait", clock.advance)
    client.ask(Heartbeat(SlotId("1-0")))
    assert len(asked) == (1 if answers else 2)
    assert clock.now() - client.last_answered_at() <= TIMEOUT


class BeatenDriver:
    """Answers each heartbeat that arrives; keeps what was asked."""

    def __init__(self) -> None:
        self.patience: list[float] = []
        self.lines: list[str] = []

    def last_answered_at(self) -> float:
        return 0.0

    def ask(self, request: object, *_: object, patience: float = 0.0) -> Any:
        if isinstance(request, LogLines):
            self.lines += request.lines
            return None
        self.patience.append(patience)
        return HeartbeatReply(0.01)


def test_an_error_of_the_machine_costs_a_slot_one_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, child = BeatenDriver(), MagicMock()
    client = cast("RendezvousClient", driver)
    agent = SlotAgent(
        SlotSpec(address="", key=b"", attempt=1), SlotIdentity(slot=SlotId("1-0")), b"", client, FakeClock()
    )
    errors = [OSError(errno.EMFILE, "Too many open files")] * 2 + [MemoryError()]

    def read_state() -> str:
        if errors:
            raise errors.pop(0)
        if len(driver.patience) == 3:
            agent._closing.set()
        return "T"

    child.state = read_state
    child.read_sample.return_value = StackSample(is_waiting=False, seconds=0.0, stack="")
    child.worker = WorkerId("1-0.1")
    agent._active, agent._heartbeat_every = child, 0.01
    agent._send_heartbeats()
    assert len(driver.patience) == 4
    for lease, slots in ((5.0, 4), (5.0, 10_000), (30.0, 100)):
        assert 2 * heartbeat_interval(lease, slots) * max(1.0, driver.patience[0] / 0.01) < lease
    agent._send_waiting_lines()
    assert driver.lines == [
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

    identity = SlotIdentity(slot=SlotId("1-0"))
    stopped = FailingDriver(SlotCommands(1, (), "enough"), clock)
    agent = SlotAgent(
        SlotSpec(address="", key=b"", attempt=1, driver_timeout=TIMEOUT),
        identity,
        b"",
        cast("RendezvousClient", stopped),
        clock,
    )
    agent._watch()
    assert agent._events.get()() == "enough"
    events.clear()
    updated = FailingDriver(WorkerUpdate(INITIAL_VERSION.next(job_ends=True)), clock)
    watch = DriverWatch(WorkerId("1-0.1"), cast("Any", updated), clock, TIMEOUT)
    watch._watch(lambda event: watch.close())
    assert watch.version.job_ends


class SilentDriver:
    """A driver that answers a registration and nothing else."""

    def __init__(self) -> None:
        self.asked: dict[type, float | None] = {}
        self.closed = threading.Event()

    def last_answered_at(self) -> float:
        return 0.0

    def ask(self, request: object, hold: float = 0.0, within: float | None = None) -> Any:
        self.asked[type(request)] = within
        if isinstance(request, RegisterSlot):
            return Admission(accepted=True)
        if not isinstance(request, WorkerStarted):
            self.closed.wait(10.0)
        raise DriverUnreachable("no answer")

    def close(self) -> None:
        self.closed.set()


def test_r12_a_registered_slot_waits_for_driver_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, spec = SilentDriver(), SlotSpec(address="", key=b"", attempt=1, driver_timeout=600.0)
    client = cast("RendezvousClient", driver)
    agent = SlotAgent(spec, SlotIdentity(slot=SlotId("1-0")), b"", client, FakeClock())
    monkeypatch.setattr(agent, "_start_child", MagicMock())
    with pytest.raises(DriverUnreachable):
        agent.run()
    assert driver.asked[RegisterSlot] is None  # the client's own time
    assert driver.asked[WorkerStarted] == pytest.approx(600.0)
