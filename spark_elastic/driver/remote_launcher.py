"""The coordinator's side of a job whose slots somebody else launches: orders go out by mail, their ends come back.

`driver.ports.Launcher`, and the driver's only sight of its cluster. Threads: the driver loop's, and the mail's.
"""

from __future__ import annotations

import threading

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.events import CancelRequested, LaunchEnded, SlotsWanted
from spark_elastic.protocol.slot_spec import SlotSpec
from spark_elastic.state.store_channel import ChannelEnd, Message, StoreChannel

LOOK_EVERY = 1.0  # seconds between two looks at how long the client has been silent


class RemoteLauncher:
    """patience: seconds of the client's silence after which the job ends."""

    def __init__(self, box: ChannelEnd, clock: Clock, patience: float) -> None:
        self.channel = StoreChannel(box, self._on_message, clock)
        self._clock = clock
        self._patience = patience
        self._post: Post | None = None
        self._closing = threading.Event()
        self._change = threading.Condition()  # owns _open
        self._open: set[int] = set()  # slot jobs
        self._watch = threading.Thread(target=self._watch_client, name="spark-elastic-client", daemon=True)

    def start(self, spec: SlotSpec, post: Post) -> None:
        self._post = post
        self.channel.send({"contact": spec.address, "certificate": spec.certificate})
        self.channel.start()
        self._watch.start()

    def launch(self, job: int) -> None:
        with self._change:
            self._open.add(job)
        self.channel.send({"launch": job})

    def close(self, timeout: float) -> list[str]:
        """Wait for slots that were released by message; the client ends what still runs, once it hears of the end."""
        self._closing.set()
        with self._change:
            self._change.wait_for(lambda: not self._open, timeout / 2)
        self._watch.join(timeout / 2)
        return []

    def _on_message(self, letter: Message) -> None:
        assert self._post is not None
        now = self._clock.now()
        match letter:
            case {
                "ended": int(job),
                "reason": str(reason),
                "cancelled": bool(cancelled),
                "executor_lost": bool(host_lost),
            }:
                with self._change:
                    self._open.discard(job)
                    self._change.notify_all()
                self._post(LaunchEnded(now, job, reason, cancelled, host_lost))
            case {"wanted": str(reason), "taken": bool(taken)}:
                self._post(SlotsWanted(now, reason, taken))
            case {"cancel": str(reason)}:
                self._post(CancelRequested(now, reason))

    def _watch_client(self) -> None:
        assert self._post is not None
        while not self._closing.wait(LOOK_EVERY):
            silent = self._clock.now() - self.channel.last_seen
            if silent > self._patience:
                reason = f"the client has not been heard for {silent:.0f} s (driver_timeout)"
                self._post(CancelRequested(self._clock.now(), reason))
                return
