"""The collectives of a group that has but one: each rank hands in a part and gets those of all, in rank order.

What reductions compute is `arithmetic.py`'s. State and threads are the subclass's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from elastic_collectives.arithmetic import narrowed, reduced, scaled, widened
from elastic_collectives.group import Array
from elastic_collectives.operands import (
    Reduction,
    as_array,
    as_reduction,
    as_rows,
    checked_root,
    checked_splits,
    even_parts,
    split,
)
from elastic_collectives.reducing import ReducingGroup


class GatheringGroup(ReducingGroup):
    """What of a `Group` follows from `_meet`."""

    @abstractmethod
    def _meet(self, call: tuple[Any, ...], part: Array) -> list[Array]:
        """Bring `part`, get all. call: what all ranks must call alike; parts may differ in their first dimension."""

    def reducescatter(
        self,
        array: Any,
        op: str = "sum",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
    ) -> Array:
        view = as_rows(array)
        reduction = as_reduction(view, op, dtype, weight, scale, compression)
        if op == "adasum":
            raise ValueError("reducescatter knows no adasum; use allreduce and take a part of its result.")
        return split(self._reduced("reducescatter", reduction), even_parts(len(view), self.size))[self.rank]

    def broadcast(self, array: Any, root: int) -> None:
        view = as_array(array, writable=self.rank != root)
        checked_root(root, self.size)
        parts = self._meet(("broadcast", view.nbytes, view.dtype.str, root), view)
        if self.rank != root:
            view.reshape(-1).view(np.uint8)[:] = parts[root].reshape(-1).view(np.uint8)

    def allgather(self, array: Any) -> Array:
        view = as_array(array, writable=False)
        return np.stack(self._meet(("allgather", view.shape, view.dtype.str), view))

    def allgatherv(self, array: Any) -> list[Array]:
        view = as_rows(array)
        return [part.copy() for part in self._meet(("allgatherv", view.shape[1:], view.dtype.str), view)]

    def alltoall(self, array: Any, splits: Sequence[int] | None = None) -> tuple[Array, list[int]]:
        view = as_rows(array)
        outgoing = np.array(checked_splits(len(view), splits, self.size))
        lengths = np.stack(self._meet(("splits", view.shape[1:], view.dtype.str), outgoing))
        parts = self._meet(("alltoall", view.shape[1:], view.dtype.str), view)
        mine = [split(part, length)[self.rank] for part, length in zip(parts, lengths.tolist(), strict=True)]
        return np.concatenate(mine), lengths[:, self.rank].tolist()

    def barrier(self) -> None:
        self._meet(("barrier",), np.empty(0))

    def _allreduce(self, reduction: Reduction) -> None:
        reduction.array[...] = self._reduced("allreduce", reduction)

    def _reduced(self, kind: str, reduction: Reduction) -> Array:
        reduction = self._by_weight(reduction)
        view, dtype = reduction.array, reduction.dtype
        own = np.zeros_like(view) if reduction.silent else view
        own = narrowed(scaled(widened(own, dtype), reduction.before), dtype)
        # 16-bit floats are told apart by name: bfloat16 looks like uint16.
        wire = dtype if reduction.wire == "plain" else reduction.wire
        call = (kind, reduction.shapes, dtype, reduction.op, wire, reduction.algorithm)
        result = self._folded(call, own if wire == dtype else narrowed(own, wire), wire, reduction)
        return result if wire == dtype else widened(result, wire)

    def _folded(self, call: tuple[Any, ...], part: Array, dtype: str, reduction: Reduction) -> Array:
        """All ranks' parts, of `dtype`, as one."""
        return reduced(self._meet(call, part), dtype, reduction.op, reduction.after)
