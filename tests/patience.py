"""Waiting for what must come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from spark_elastic.clock import SystemClock

T = TypeVar("T")
SECONDS = 40.0


def until(look: Callable[[], T], seconds: float = SECONDS) -> T:
    """The first truthy answer of `look`."""
    clock = SystemClock()
    deadline = clock.now() + seconds
    while not (seen := look()):
        assert clock.now() < deadline, f"did not come within {seconds} s"
        clock.sleep(0.005)
    return seen
