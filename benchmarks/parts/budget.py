"""The time that a benchmark may take: what it does not reach is left out, and said."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Budget:
    """Begins with its creation. A case that has begun is completed."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        return time.monotonic() > self._end

    def share(self, parts: int) -> Budget:
        """That of the next of so many parts, which may take equally long."""
        return Budget(max(0.0, self._end - time.monotonic()) / parts)

    def take(self, cases: Iterable[T], what: str) -> Iterator[T]:
        """The first case, and others as long as there is time. what: the cases, for the line that tells of the rest."""
        given = list(cases)
        for number, case in enumerate(given):
            if number and self.is_spent:
                print(
                    f"left out after {self._seconds:.0f} s: {len(given) - number} of {len(given)} {what}",
                    flush=True,
                )
                return
            yield case
