"""The current world as operations see it: its group, or a world of one in a process that is no worker. Any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from elastic_collectives import Group
from elastic_collectives.arithmetic import narrowed, reduced, scaled, widened
from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import current
from spark_elastic.worker.seat import group_of

# The group of a process that is no worker: a world of one, whose collectives are computed at once. Any thread.


class SingleProcessGroup:
    """The part of `Group` that operations use, for a world of one."""

    rank = 0
    size = 1
    members = (0,)
    fence = (0, 0)
    timeout = 60.0

    def allreduce(self, array: Array, op: str = "sum", **how: Any) -> None:
        array[...] = self.reducescatter(
            array, op, how.get("dtype"), None, how.get("scale", (1.0, 1.0)), how.get("compression")
        )

    def grouped_allreduce(self, arrays: Sequence[Array], op: str, *how: Any) -> None:
        for array in arrays:
            array[...] = self.reducescatter(array, op, *how)

    def reducescatter(
        self,
        array: Array,
        op: str,
        dtype: str | None,
        weight: None,
        scale: tuple[float, float],
        compression: str | None,
    ) -> Array:
        name = dtype or array.dtype.name
        own = narrowed(scaled(widened(array, name), scale[0]), name)
        return reduced([own], name, op, scale[1])

    def broadcast(self, array: Array, root: int) -> None:
        """Nothing to do."""

    def allgatherv(self, array: Array) -> list[Array]:
        return [array.copy()]

    def alltoall(self, array: Array, splits: Sequence[int] | None = None) -> tuple[Array, list[int]]:
        return array.copy(), [len(array)]

    def barrier(self) -> None:
        """Nothing to do."""


def world() -> Group:
    """The group of all ranks. Only the main thread may call its collectives.

    Raises:
        CollectiveError: between two worlds there is none.
    """
    here = current()
    return cast("Group", SingleProcessGroup()) if here is None else group_of(here)


# How many backward passes make a step. Written by whoever runs the optimizer, one at a time.


def validate_backward_passes(count: int) -> int:
    """The same number.

    Raises:
        InvalidInput: it is below 1.
    """
    if count < 1:
        raise InvalidInput(f"backward_passes_per_step must be at least 1; got {count}.")
    return count


class PassCounter:
    """Counts the backward passes of a step. An unfinished count is dropped when the world changes."""

    def __init__(self, count: int) -> None:
        self.count = validate_backward_passes(count)
        self._taken = 0
        self._fence = (0, 0)  # the world in which they were counted

    def begin_pass(self) -> bool:
        """Called before a pass is added. Returns whether it is the first of a step."""
        fence = world().fence
        if fence != self._fence:
            self._fence, self._taken = fence, 0
        return self._taken == 0

    def complete_pass(self) -> bool:
        """Called after a pass was added. Returns whether that completes a step."""
        self._taken = (self._taken + 1) % self.count
        return self._taken == 0
