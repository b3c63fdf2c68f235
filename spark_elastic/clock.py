"""Time. Only this module imports `time`; all other code takes a `Clock` or a `now` value.

`now()` is this machine's monotonic clock and is not compared between machines. `wall()` is for people and for ages of
files.
"""

from __future__ import annotations

import time
from typing import Protocol


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


def read_thread_seconds() -> float:
    """For how long this thread has run, or waited for a processor; without Linux's figures only the former."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran, waited, _ = file.read().split()
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()
