"""The group of a process that is no worker: a world of one, whose collectives are computed at once. Any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_collectives.arithmetic import narrowed, reduced, scaled, widened
from elastic_collectives.group import Array


class Alone:
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
