"""The coordinator's launcher: requests and events; a client that is silent for too long ends the job."""

from __future__ import annotations

import threading
from typing import Any

from spark_elastic.clusters.coordinator import ClientCall, RemoteLauncher
from spark_elastic.protocol.events import CancelRequested, LaunchEnded, SlotsWanted
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.runs.store_channel import ChannelEnd, StoreChannel
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


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
