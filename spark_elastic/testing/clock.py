"""A clock whose time is moved by hand. One thread moves it; any may read."""

from __future__ import annotations


class FakeClock:
    """`spark_elastic.clock.Clock` for tests: `sleep` moves the time instead of waiting."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall_offset + self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds} s")
        self._now += seconds
