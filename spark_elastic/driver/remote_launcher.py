"""The driver's side of a job whose driver runs in a task: its client launches the slots.

The launcher sends requests to the client through a `StoreChannel`, and the client answers with driver events. Two
threads: the driver loop's, and the channel's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.events import CancelRequested, LaunchEnded, SlotsWanted
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.runs.store_channel import ChannelEnd, StoreChannel

LOOK_EVERY = 1.0  # seconds between two looks at how long the client has been silent
CLIENT_EVENTS = (LaunchEnded, SlotsWanted, CancelRequested)  # what the client sends


@dataclass(frozen=True)
class ClientCall:
    """A method that the client is to call, if it is one of those that it lists."""

    target: str  # name of the object, which the client has
    method: str  # name
    arguments: tuple[Any, ...]  # in their order; the client checks their types


class RemoteLauncher:
    """`driver.ports.Launcher` by way of a client. silence_limit: seconds without word from it after which the job is
    cancelled."""

    def __init__(self, end: ChannelEnd, clock: Clock, silence_limit: float) -> None:
        self.channel = StoreChannel(end, CLIENT_EVENTS, self._on_event, clock)
        self._clock = clock
        self._silence_limit = silence_limit
        self._post: Post | None = None
        self._closing = threading.Event()
        self._change = threading.Condition()  # owns _open
        self._open: set[int] = set()  # numbers of the slot launches that have not ended
        self._watch = threading.Thread(target=self._watch_client, name="spark-elastic-client", daemon=True)

    def start(self, spec: SlotSpec, post: Post) -> None:
        self._post = post
        self.channel.send(ClientCall("client", "on_started", (spec.address, spec.certificate)))
        self.channel.start()
        self._watch.start()

    def launch(self, launch: int) -> None:
        with self._change:
            self._open.add(launch)
        self.channel.send(ClientCall("launcher", "launch", (launch,)))

    def close(self, timeout: float) -> list[str]:
        """Wait for the slots, which the driver has released by message. When the client learns of the job's end, it
        cancels those that still run."""
        self._closing.set()
        with self._change:
            self._change.wait_for(lambda: not self._open, timeout / 2)
        self._watch.join(timeout / 2)
        return []

    def _on_event(self, event: LaunchEnded | SlotsWanted | CancelRequested) -> None:
        assert self._post is not None
        if isinstance(event, LaunchEnded):
            with self._change:
                self._open.discard(event.launch)
                self._change.notify_all()
        self._post(replace(event, now=self._clock.now()))  # the client has a clock of its own

    def _watch_client(self) -> None:
        assert self._post is not None
        while not self._closing.wait(LOOK_EVERY):
            silent = self._clock.now() - self.channel.last_seen
            if silent > self._silence_limit:
                reason = f"the client has sent nothing for {silent:.0f} s (driver_timeout)"
                self._post(CancelRequested(self._clock.now(), reason))
                return
