"""The only place that names time: everything else takes a `Clock` or a `now` value.

`now()` is monotonic seconds of this process (never compared between processes); `wall()` is seconds since the
Unix epoch, for people and for ages of files.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. `spark_elastic.testing` has one whose time is moved by hand."""

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
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
