"""How long a benchmark may take.

    with limit_time(300):
        for size in within_budget((2, 8, 32), "workers"):

A case that would not end in time, by what the longest before it took, is left out, and so are those after it: the
report names them. A case that nobody expected to take so long is stopped at twice the time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Case = TypeVar("Case")


class Budget:
    """Without a limit until `limit_time`. In its own process alone: ranks that count for themselves would disagree."""

    def __init__(self) -> None:
        self.ends = float("inf")  # of time.monotonic
        self.left_out: list[str] = []
        self.current = ""


BUDGET = Budget()


@contextmanager
def limit_time(seconds: float) -> Iterator[Budget]:
    def stop(*_: Any) -> None:
        raise TimeoutError(
            f"it had not ended after twice its {seconds:.0f} s, at: {BUDGET.current or 'its begin'}"
        )

    BUDGET.__init__()  # type: ignore[misc]
    BUDGET.ends = time.monotonic() + seconds
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
    try:
        yield BUDGET
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        BUDGET.ends = float("inf")


def within_budget(cases: Iterable[Case], kind: str) -> Iterator[Case]:
    """The cases for which there is time: at least the first. kind: what one is, for the report."""
    all_cases, longest = list(cases), 0.0
    for number, case in enumerate(all_cases):
        begun = time.monotonic()
        if number and begun + longest > BUDGET.ends:
            BUDGET.left_out += [f"{kind} {other}" for other in all_cases[number:]]
            return
        BUDGET.current = f"{kind} {case}"
        yield case
        longest = max(longest, time.monotonic() - begun)
