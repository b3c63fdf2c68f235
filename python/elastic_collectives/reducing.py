"""The part of `Group` that does not depend on who sums: validates arguments, fuses arrays by dtype, resolves weights.

State and threads belong to the subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from elastic_collectives.group import Array
from elastic_collectives.operands import Reduction, as_array, as_reduction, fuse_reductions

T = TypeVar("T", bound="Closing")


class Closing(ABC):
    """A context manager that calls `close` at the end of the `with` block."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ReducingGroup(Closing):
    """The methods of a `Group` that build on `_allreduce`, `allgather` and `allgatherv`."""

    rank: int
    size: int

    @abstractmethod
    def allgather(self, array: Any, out: Array | None = None) -> Array: ...

    @abstractmethod
    def allgatherv(self, array: Any) -> list[Array]: ...

    @abstractmethod
    def _allreduce(self, reduction: Reduction) -> None:
        """In place; its weight, if it has one, is this rank's own yet: see `_resolve_weight`."""

    def allreduce(
        self,
        array: Any,
        op: str = "sum",
        algorithm: str = "auto",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
    ) -> None:
        view = as_array(array, writable=True)
        self._allreduce(as_reduction(view, op, dtype, weight, scale, compression, algorithm))

    def grouped_allreduce(
        self,
        arrays: Sequence[Any],
        op: str = "sum",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
    ) -> None:
        views = [as_array(array, writable=True) for array in arrays]
        whole = [as_reduction(view, op, dtype, weight, scale, compression) for view in views]
        for reduction in fuse_reductions(whole):
            self._allreduce(reduction)

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [part.tobytes() for part in self.allgatherv(np.frombuffer(data, np.uint8))]

    def _resolve_weight(self, reduction: Reduction) -> Reduction:
        """Gather the ranks' weights and turn a weighted average into a sum with a factor per rank."""
        if reduction.weight is None:
            return reduction
        weights = self.allgather(np.array([reduction.weight], np.float64))
        return reduction.with_weights(weights.ravel().tolist(), self.rank)
