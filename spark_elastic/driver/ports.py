"""What the driver needs of a cluster, and the part of a launcher that does not depend on the cluster.

`clusters.spark` implements it over Spark, `clusters.local` over processes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from spark_elastic.clock import Clock
from spark_elastic.protocol.events import DriverEvent, LaunchEnded
from spark_elastic.protocol.types import SlotOutcome, SlotSpec

Post = Callable[[DriverEvent], None]


class Launcher(Protocol):
    """Launches slots: one job of the cluster per slot."""

    def start(self, spec: SlotSpec, post: Post) -> None:
        """Get ready to launch slots that are described by `spec`; `post` takes events from any thread."""
        ...

    def launch(self, launch: int) -> None:
        """Start the slot launch of that number, without blocking; its end is posted as `LaunchEnded`."""
        ...

    def close(self, timeout: float) -> list[str]:
        """Cancel the slots that still run and wait. Returns those that did not end within `timeout` seconds."""
        ...


class Discovery(Protocol):
    """Watches the cluster's hosts, and posts `HostAppeared`, `HostLost` and `DrainRequested`."""

    def start(self, post: Post) -> None: ...

    def close(self) -> None: ...


CANCEL_EVERY = 0.5  # seconds between two cancels of what still runs at the end


class ThreadPerSlotLauncher(ABC):
    """Subclasses say how a slot runs and how all slots are cancelled."""

    thread_class: ClassVar[type[threading.Thread]] = threading.Thread  # the class of the slots' threads
    grace: ClassVar[float] = 1 / 3  # part of the time of `close` before slots are cancelled

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        # From `start` on:
        self.spec: SlotSpec
        self._post: Post

    @abstractmethod
    def run_slot(self, launch: int) -> SlotOutcome | None:
        """Run the slot to its end, in its thread. Returns None if it never began, because the launcher was closed."""

    @abstractmethod
    def cancel(self) -> None:
        """End all slots that still run. Called repeatedly: a slot that is just being submitted escapes the first."""

    def explain_failed_start(self, error: Exception) -> SlotOutcome:
        """By default, the driver launches such a slot again."""
        return SlotOutcome(f"it could not be started: {type(error).__name__}: {error}")

    def start(self, spec: SlotSpec, post: Post) -> None:
        self.spec, self._post = spec, post

    def launch(self, launch: int) -> None:
        name = f"slot launch {launch}"
        try:  # Spark's class asks the JVM already when a thread is made
            thread = self.thread_class(target=self._run_and_post, args=(launch,), name=name, daemon=True)
            thread.start()
        except Exception as error:  # the process has as many threads or descriptors as it may
            self._post_end(launch, self.explain_failed_start(error))
            return
        self._threads.append(thread)

    def close(self, timeout: float) -> list[str]:
        """Wait for the slots, which the driver has released by message; after a while cancel those that still run."""
        deadline = self._clock.now() + timeout
        self._closing.set()
        self._join(self._clock.now() + timeout * self.grace)
        while self._list_running() and self._clock.now() < deadline:
            self.cancel()
            self._join(min(deadline, self._clock.now() + CANCEL_EVERY))
        return [thread.name for thread in self._list_running()]

    def _run_and_post(self, launch: int) -> None:
        if self._closing.is_set():
            return
        try:
            self._post_end(launch, self.run_slot(launch))
        except Exception as error:  # the driver launches the slot again
            self._post_end(launch, self.explain_failed_start(error))

    def _post_end(self, launch: int, end: SlotOutcome | None) -> None:
        if end is not None and not self._closing.is_set():
            self._post(LaunchEnded(self._clock.now(), launch, *end))

    def _list_running(self) -> list[threading.Thread]:
        return [thread for thread in self._threads if thread.is_alive()]

    def _join(self, deadline: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.now()))
