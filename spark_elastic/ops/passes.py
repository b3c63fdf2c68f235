"""How many backward passes make a step. Written by whoever runs the optimizer, one at a time."""

from __future__ import annotations

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.world import world


def checked_passes(count: int) -> int:
    """The same number.

    Raises:
        InvalidInput: it is below 1.
    """
    if count < 1:
        raise InvalidInput(f"backward_passes_per_step must be at least 1; got {count}.")
    return count


class PassCount:
    """Counts the backward passes of a step. An unfinished count is dropped when the world changes."""

    def __init__(self, count: int) -> None:
        self.count = checked_passes(count)
        self._taken = 0
        self._fence = (0, 0)  # the world in which they were counted

    def begin(self) -> bool:
        """Called before a pass is added. Returns whether it is the first of a step."""
        fence = world().fence
        if fence != self._fence:
            self._fence, self._taken = fence, 0
        return self._taken == 0

    def complete(self) -> bool:
        """Called after a pass was added. Returns whether that completes a step."""
        self._taken = (self._taken + 1) % self.count
        return self._taken == 0
