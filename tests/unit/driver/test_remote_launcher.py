"""The coordinator's launcher: orders out, ends in; a client that is silent for too long ends the job."""

from __future__ import annotations

import threading
from typing import Any

from spark_elastic.data.store import memory_store
from spark_elastic.driver.remote_launcher import RemoteLauncher
from spark_elastic.protocol.events import CancelRequested, LaunchEnded, SlotsWanted
from spark_elastic.protocol.slot_spec import SlotSpec
from spark_elastic.state.store_channel import ChannelEnd, StoreChannel
from spark_elastic.testing.fakes import FakeClock


def test_orders_go_out_and_ends_come_back() -> None:
    store, clock = memory_store(), FakeClock()
    orders: list[Any] = []
    events: list[Any] = []
    client = StoreChannel(ChannelEnd(store, "m", b"key", "client", "task"), orders.append, clock)
    launcher = RemoteLauncher(ChannelEnd(store, "m", b"key", "task", "client"), clock, 60.0)
    launcher.start(SlotSpec(address="10.0.0.1:7", key=b"key", attempt=1), events.append)
    launcher.launch(3)
    for letter in (
        {"ended": 3, "reason": "lost", "cancelled": False, "executor_lost": True},
        {"wanted": "others", "taken": True},
        {"cancel": "stop"},
    ):
        client.send(letter)
    client.poll()
    assert launcher.close(20.0) == []  # returns once job 3 has ended
    launcher.channel.close(10.0)
    client.poll()
    assert orders == [{"contact": "10.0.0.1:7", "certificate": None}, {"launch": 3}]
    assert events == [
        LaunchEnded(clock.now(), 3, "lost", False, True),
        SlotsWanted(clock.now(), "others", True),
        CancelRequested(clock.now(), "stop"),
    ]


def test_a_client_that_is_gone_ends_the_job() -> None:
    clock = FakeClock()
    cancelled = threading.Event()
    events: list[Any] = []

    def post(event: Any) -> None:
        events.append(event)
        cancelled.set()

    launcher = RemoteLauncher(ChannelEnd(memory_store(), "m", b"key", "task", "client"), clock, 60.0)
    launcher.start(SlotSpec(address="10.0.0.1:7", key=b"key", attempt=1), post)
    clock.advance(61)
    assert cancelled.wait(20)
    launcher.close(5.0)
    launcher.channel.close(10.0)
    assert [type(event) for event in events] == [CancelRequested]
    assert "has not been heard for 61 s" in events[0].reason
