"""What of a `Group` is the same whoever sums: arguments are checked, fused by dtype, and weighed by what ranks say.

State and threads are the subclass's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from elastic_collectives.closing import Closing
from elastic_collectives.group import Array
from elastic_collectives.operands import Reduction, as_array, as_reduction, fused


class ReducingGroup(Closing):
    """What of a `Group` follows from `_allreduce` and the two ways to gather."""

    rank: int
    size: int

    @abstractmethod
    def allgather(self, array: Any) -> Array: ...

    @abstractmethod
    def allgatherv(self, array: Any) -> list[Array]: ...

    @abstractmethod
    def _allreduce(self, reduction: Reduction) -> None:
        """In place; its weight, if it has one, is this rank's own yet: see `_by_weight`."""

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
        for reduction in fused(whole):
            self._allreduce(reduction)

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [part.tobytes() for part in self.allgatherv(np.frombuffer(data, np.uint8))]

    def _by_weight(self, reduction: Reduction) -> Reduction:
        if reduction.weight is None:
            return reduction
        weights = self.allgather(np.array([reduction.weight], np.float64))
        return reduction.weighted(weights.ravel().tolist(), self.rank)
