"""The interface of everything that observes a job, and a thread that calls listeners which may block.

Observers decide nothing: a listener that fails or blocks harms neither the job nor the other listeners.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from spark_elastic.protocol.commands import DriverCommand
from spark_elastic.protocol.driver.state import DriverState
from spark_elastic.protocol.events import DriverEvent

log = logging.getLogger("spark_elastic")

MAX_PENDING = 10_000  # calls that wait for a listener
CLOSE_SECONDS = 2.0  # how long the end of a job waits for a listener that blocks

Commands: TypeAlias = Sequence[DriverCommand]
Metrics: TypeAlias = Mapping[str, Any]
Call: TypeAlias = Callable[[], object]
L = TypeVar("L", bound="JobListener")


class JobListener:
    """Hooks of a job, which all do nothing here. Several threads call them."""

    def on_transition(self, event: DriverEvent, commands: Commands, state: DriverState | None) -> None:
        """The driver machine has handled an event, with these decisions; only for observers of `JobMonitor`. state: the
        machine's afterwards; None: it failed."""

    def on_world(self, size: int, reason: str) -> None:
        """A new world has been published. A message follows once all its members have built it."""

    def on_world_broken(self, reason: str) -> None:
        """A world has broken. reason: says which member was lost, and how, as far as the driver knows."""

    def on_message(self, text: str) -> None:
        """A sentence for people, such as a join, loss, drain or recovery with its cost."""

    def on_notice(self, text: str) -> None:
        """A sentence that people need in any case: how a worker's process ended, or what the job waits for."""
        self.on_message(text)

    def on_progress(self, metrics: Metrics) -> None:
        """The newest report of rank 0."""

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        """A worker has printed a line. worker: its id, "" before it is one. rank: None: it is in no world."""

    def close(self) -> None:
        """The job is over."""


class AsyncNotifier:
    """Calls listeners from a thread of its own, in order; a context manager. `submit` and `submit_latest` never block:
    if listeners are too slow, the newest calls are dropped and counted (`overflow`). Failures are logged."""

    def __init__(
        self,
        max_pending: int = MAX_PENDING,
        overflow: str = "%d notifications were dropped: the job listener is too slow",
    ) -> None:
        self._max_pending, self._overflow = max_pending, overflow
        self._calls: queue.SimpleQueue[tuple[Call, int] | None] = queue.SimpleQueue()  # None ends the thread
        self._lock = threading.RLock()  # guards the next three; destructors log, too, also inside
        self._pending = 0  # sum of the sizes of what waits
        self._dropped = 0  # calls since the last one that was made
        self._latest: Call | None = None  # of `submit_latest`; its place is already in `_calls`
        self._thread = threading.Thread(target=self._run, name="spark-elastic-notifier", daemon=True)

    def __enter__(self) -> AsyncNotifier:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(CLOSE_SECONDS)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, call: Call, size: int = 1) -> None:
        """Make this call after all earlier ones, or drop it: sizes of what waits add up to `max_pending` at most."""
        with self._lock:
            if self._pending + size > self._max_pending:
                self._dropped += 1
                return
            self._pending += size
        self._calls.put((call, size))

    def submit_latest(self, call: Call) -> None:
        """The same, but it replaces an earlier one of its kind that still waits. It is never dropped."""
        with self._lock:
            if self._latest is None:
                self._calls.put((self._call_latest, 0))
            self._latest = call

    def close(self, within: float = CLOSE_SECONDS) -> None:
        """Make the calls that wait; a listener that blocks for longer than `within` seconds is abandoned."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(within)

    def _call_latest(self) -> None:
        with self._lock:
            call, self._latest = self._latest, None
        if call is not None:
            call()

    def _run(self) -> None:
        for call, size in iter(self._calls.get, None):
            with self._lock:
                dropped, self._dropped = self._dropped, 0
                self._pending -= size
            if dropped:
                log.warning(self._overflow, dropped)
            try:
                call()
            except Exception:
                log.exception("the job listener failed")


@contextmanager
def close_within_deadline(listener: L) -> Iterator[L]:
    """Like `contextlib.closing`, but `close` may block or fail without any effect on the job."""
    try:
        yield listener
    finally:
        with AsyncNotifier() as notifier:
            notifier.submit(listener.close)
