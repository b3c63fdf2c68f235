"""Time. Only this module imports `time`; all other code takes a `Clock` or a `now` value.

`now()` is this machine's monotonic clock and is not compared between machines. `wall()` is for people and for ages of
files.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

LONGEST_PAUSE = 5.0  # seconds of a pause, or of a jump, that a `RunningClock` counts


class Clock(Protocol):
    """A source of time. `spark_elastic.testing.FakeClock` is one that tests move by hand."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds`."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class RunningClock:
    """A clock that stands still while its process does not run, or when the machine's clock jumps: what became due
    meanwhile is not overdue. Its owner reads it many times a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # owns the fields below
        self._newest = clock.now()
        self._skipped = 0.0  # seconds

    def now(self) -> float:
        with self._lock:
            now = self._clock.now()
            passed, self._newest = now - self._newest, now
            self._skipped += passed - min(max(0.0, passed), LONGEST_PAUSE)
            return now - self._skipped

    def wall(self) -> float:
        return self._clock.wall()

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)


def read_thread_seconds() -> float:
    """For how long this thread has run, or waited for a processor; without Linux's figures only the former."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran, waited, _ = file.read().split()
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()
