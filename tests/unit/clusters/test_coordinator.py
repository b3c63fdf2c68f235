"""What a coordinator in a task cannot have, and how its end reaches the client."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from spark_elastic.clusters.coordinator import (
    CLIENT,
    COORDINATOR,
    MOST_IDLE,
    ChannelEnd,
    ClientCall,
    Coordinator,
    CoordinatorClient,
    JobEnd,
    RemoteLauncher,
    StoreChannel,
    check_config,
    resume_after_coordinator_loss,
)
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.gang_scheduler import GangScheduler, JobQueue
from spark_elastic.errors import CoordinatorLost, InvalidInput, JobFailed, NotEnoughWorkers, WorkerFailed
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.events import CancelRequested, LaunchEnded, SlotsWanted
from spark_elastic.protocol.types import Limits, SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store

SPEC = SlotSpec(address="", key=b"key", attempt=1, job_name="job")


@pytest.mark.parametrize(
    "setting",
    [
        {"journal": "story.jsonl"},
        {"tls_certificate": "c", "tls_key": "k"},
        {"handle": object()},
        {"host_discovery": "./hosts.sh"},
    ],
)
def test_settings_of_the_clients_machine_are_refused_for_a_coordinator(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="does not work where executors cannot reach the client"):
        check_config(ElasticConfig(**setting))
    config = check_config(ElasticConfig(advertise_address="client", bind_address="0.0.0.0", lease=7.0))
    assert (config.advertise_address, config.bind_address, config.lease) == (None, None, 7.0)


def make_client(launcher: Any, clock: FakeClock, store: Store | None = None) -> CoordinatorClient:
    """Of the only job of its application."""
    end = ChannelEnd(store or make_memory_store(), "m", b"key", CLIENT, COORDINATOR)
    turn = GangScheduler(JobQueue(), "job", Limits(1, 1, 1), clock)
    return CoordinatorClient(end, SPEC, launcher, turn, JobListener(), clock)


def test_the_end_of_the_coordinators_job_is_that_of_the_clients() -> None:
    end = JobEnd(JobReport(3.0), ("1", "2"))
    launched = codec.read(JobEnd, codec.to_plain(end)).unpack()
    assert (launched.results, launched.report.seconds) == (("1", "2"), 3.0)
    with pytest.raises(WorkerFailed, match="no such luck") as failed:
        JobEnd(JobReport(seconds=3.0), error="WorkerFailed", text="no such luck").unpack()
    assert failed.value.report.seconds == 3.0
    with pytest.raises(JobFailed, match="of a later release"):
        JobEnd(error="Unknown", text="of a later release").unpack()


@pytest.mark.parametrize(
    ("taken", "error", "sentence"),
    [
        (False, NotEnoughWorkers, "no executor took the coordinator of job within 60 s"),
        (True, CoordinatorLost, "was lost: it has sent nothing for 60 s"),  # its executor is gone
    ],
)
def test_a_silent_coordinator_has_a_deadline(taken: bool, error: type[Exception], sentence: str) -> None:
    clock, store = FakeClock(), make_memory_store()
    began, closed = threading.Event(), threading.Event()
    launcher: Any = SimpleNamespace(
        start=lambda contact, post: began.set(), close=lambda timeout: closed.set() or []
    )
    client = make_client(launcher, clock, store)
    task = StoreChannel(ChannelEnd(store, "m", b"key", COORDINATOR, CLIENT), [], lambda message: None, clock)

    def carry() -> str:
        if taken:
            task.send(ClientCall("client", "on_started", ("10.0.0.1:7", None)))
            task.poll()
            began.wait(20)
        clock.advance(61)
        closed.wait(20)
        return "interrupted"

    with pytest.raises(error, match=sentence):
        client.follow(carry, ElasticConfig(start_timeout=60.0, driver_timeout=60.0))


def test_a_failure_of_the_coordinators_own_reaches_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=RuntimeError("no port was free"))
    monkeypatch.setattr("spark_elastic.clusters.coordinator.supervise", fail)
    store = make_memory_store()
    end = ChannelEnd(store, "m", b"key", COORDINATOR, CLIENT)
    task = Coordinator(
        end, Limits(1, 1, 1), ElasticConfig(), "job", encrypted=False, check_host=lambda facts: None, run=None
    )
    task.run_driver("127.0.0.1")
    client = make_client(SimpleNamespace(close=lambda timeout: []), FakeClock(), store)
    with pytest.raises(JobFailed, match=r"the coordinator of job, .*\n(.*\n)*RuntimeError: no port was free"):
        client.follow(lambda: "it has ended", ElasticConfig())


@pytest.mark.parametrize(
    ("losses", "advances", "ends"), [(5, True, True), (MOST_IDLE - 1, False, True), (MOST_IDLE, False, False)]
)
def test_a_run_resumes_as_long_as_it_advances(losses: int, advances: bool, ends: bool) -> None:
    tries: list[int] = []

    def attempt() -> str:
        tries.append(len(tries))
        if len(tries) <= losses:
            raise CoordinatorLost("gone")
        return "done"

    with nullcontext() if ends else pytest.raises(CoordinatorLost):
        assert resume_after_coordinator_loss(attempt, lambda: len(tries) if advances else 0) == "done"
        assert len(tries) == losses + 1


def test_r17_the_clients_scheduler_gets_whether_the_coordinator_lacks_slots() -> None:
    clock = FakeClock()
    client = make_client(None, clock)
    turn = client._scheduler
    with turn.alive_lock, turn:
        client._call(ClientCall("scheduler", "finish_gathering", ()))
        client._call(ClientCall("scheduler", "report_shortage", (True,)))
        client._call(ClientCall("listener", "on_world", (2, "all are there")))  # its listener is behind
        clock.advance(60.0)
        assert turn._is_short()


@pytest.mark.parametrize(
    "call",
    [
        ClientCall("launcher", "close", (0.0,)),
        ClientCall("listener", "__class__", ()),
        ClientCall("os", "system", ("true",)),
        ClientCall("launcher", "launch", ("3",)),
        ClientCall("launcher", "launch", (3, 4)),
        ClientCall("log", "emit", ({"level": 20, "logger": "x"},)),
    ],
)
def test_p6_a_coordinator_has_only_listed_methods_called_with_their_types(call: ClientCall) -> None:
    called: list[Any] = []
    client = make_client(SimpleNamespace(launch=called.append, close=called.append), FakeClock())
    client._call(codec.read(ClientCall, codec.to_plain(ClientCall("launcher", "launch", (3,)))))
    with pytest.raises((KeyError, ValueError)):
        client._call(codec.read(ClientCall, codec.to_plain(call)))
    assert called == [3]


def test_requests_reach_the_client_and_its_events_the_driver() -> None:
    store, clock = make_memory_store(), FakeClock()
    requests: list[Any] = []
    events: list[Any] = []
    client = StoreChannel(
        ChannelEnd(store, "m", b"key", "client", "task"), [ClientCall], requests.append, clock
    )
    launcher = RemoteLauncher(ChannelEnd(store, "m", b"key", "task", "client"), clock, 60.0)
    launcher.start(SlotSpec(address="10.0.0.1:7", key=b"key", attempt=1), events.append)
    launcher.launch(3)
    for event in (
        LaunchEnded(7.0, 3, "lost", False, True),
        SlotsWanted(7.0, "others", True),
        CancelRequested(7.0, "stop"),
    ):
        client.send(event)
    client.poll()
    assert launcher.close(20.0) == []  # returns once launch 3 has ended
    launcher.channel.close(10.0)
    client.poll()
    started = ClientCall("client", "on_started", ("10.0.0.1:7", None))
    assert requests == [started, ClientCall("launcher", "launch", (3,))]
    assert events == [
        LaunchEnded(clock.now(), 3, "lost", False, True),
        SlotsWanted(clock.now(), "others", True),
        CancelRequested(clock.now(), "stop"),
    ]


def test_a_silent_client_ends_the_job() -> None:
    clock = FakeClock()
    cancelled = threading.Event()
    events: list[Any] = []

    def post(event: Any) -> None:
        events.append(event)
        cancelled.set()

    launcher = RemoteLauncher(ChannelEnd(make_memory_store(), "m", b"key", "task", "client"), clock, 60.0)
    launcher.start(SlotSpec(address="10.0.0.1:7", key=b"key", attempt=1), post)
    clock.advance(61)
    assert cancelled.wait(20)
    launcher.close(5.0)
    launcher.channel.close(10.0)
    assert [type(event) for event in events] == [CancelRequested]
    assert "has sent nothing for 61 s" in events[0].reason
