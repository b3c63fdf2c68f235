"""All collectives of a `Group` built on a single one: each rank passes an array in and receives those of all ranks.

`tests/reductions.py` computes the reductions. State and threads belong to the subclass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from elastic_collectives.errors import MismatchError
from elastic_collectives.group import Group
from elastic_collectives.operands import (
    Array,
    Reduction,
    apply_scale,
    as_array,
    as_reduction,
    as_result,
    as_rows,
    divide_evenly,
    narrow,
    split,
    validate_root,
    validate_splits,
    widen,
)
from tests.reductions import reduce_parts


class GatheringGroup(Group):
    """The methods of a `Group` that build on `_exchange_parts`."""

    @abstractmethod
    def abort(self, reason: str) -> None: ...

    @abstractmethod
    def _exchange_parts(self, call: tuple[Any, ...], part: Array) -> list[Array]:
        """Send `part` to all ranks and return all parts in rank order.

        Args:
            call: must be equal on all ranks.
            part: may differ between ranks in its first dimension.
        """

    def reducescatter(
        self,
        array: Any,
        op: str = "sum",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
        out: Array | None = None,
    ) -> Array:
        view = as_rows(array)
        reduction = as_reduction(view, op, dtype, weight, scale, compression)
        if op == "adasum":
            raise ValueError("reducescatter knows no adasum; use allreduce and take a part of its result.")
        parts = split(self._reduce("reducescatter", reduction), divide_evenly(len(view), self.size))
        return _place(parts[self.rank], out)

    def broadcast(self, array: Any, root: int) -> None:
        view = as_array(array, writable=self.rank != root)
        validate_root(root, self.size)
        parts = self._exchange_parts(("broadcast", view.nbytes, view.dtype.str, root), view)
        if self.rank != root:
            view.reshape(-1).view(np.uint8)[:] = parts[root].reshape(-1).view(np.uint8)

    def allgather(self, array: Any, out: Array | None = None) -> Array:
        view = as_array(array, writable=False)
        return _place(np.stack(self._exchange_parts(("allgather", view.shape, view.dtype.str), view)), out)

    def allgatherv(self, array: Any) -> list[Array]:
        view = as_rows(array)
        return [
            part.copy() for part in self._exchange_parts(("allgatherv", view.shape[1:], view.dtype.str), view)
        ]

    def alltoall(
        self,
        array: Any,
        splits: Sequence[int] | None = None,
        out: Array | None = None,
        incoming: Sequence[int] | None = None,
    ) -> tuple[Array, list[int]]:
        view = as_rows(array)
        outgoing = validate_splits(len(view), splits, self.size)
        told = np.array([outgoing, incoming or [-1] * self.size])
        both = np.stack(self._exchange_parts(("splits", view.shape[1:], view.dtype.str), told))
        lengths, expected = both[:, 0], both[:, 1]
        for receiver, sender in np.argwhere((expected >= 0) & (expected != lengths.T)).tolist():
            reason = (
                f"rank {sender} sends {lengths[sender, receiver]} rows to rank {receiver}, which expects "
                f"{expected[receiver, sender]}"
            )
            self.abort(reason)
            raise MismatchError((receiver, sender), reason)
        counts: list[int] = lengths[:, self.rank].tolist()
        parts = self._exchange_parts(("alltoall", view.shape[1:], view.dtype.str), view)
        mine = [split(part, length)[self.rank] for part, length in zip(parts, lengths.tolist(), strict=True)]
        return _place(np.concatenate(mine), out), counts

    def alltoall_arrays(self, arrays: Sequence[Array], out: Sequence[Array]) -> None:
        lengths = [array.size for array in out]
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        received, _ = self.alltoall(flat, [array.size for array in arrays], incoming=lengths)
        for target, part in zip(out, split(received, lengths), strict=True):
            target[...] = part.reshape(target.shape)

    def barrier(self) -> None:
        self._exchange_parts(("barrier",), np.empty(0))

    def _allreduce(self, reduction: Reduction) -> None:
        reduction.array[...] = self._reduce("allreduce", reduction)

    def _reduce(self, kind: str, reduction: Reduction) -> Array:
        reduction = self._resolve_weight(reduction)
        view, dtype = reduction.array, reduction.dtype
        own = np.zeros_like(view) if reduction.is_ignored else view
        own = narrow(apply_scale(widen(own, dtype), reduction.before), dtype)
        # The name tells 16-bit floats apart: numpy holds bfloat16 as uint16.
        wire = dtype if reduction.wire == "plain" else reduction.wire
        call = (kind, reduction.shapes, dtype, reduction.op, wire, reduction.algorithm)
        result = self._fold_parts(call, own if wire == dtype else narrow(own, wire), wire, reduction)
        return result if wire == dtype else widen(result, wire)

    def _fold_parts(self, call: tuple[Any, ...], part: Array, dtype: str, reduction: Reduction) -> Array:
        """Reduce the parts of all ranks, which have this dtype, to one array."""
        return reduce_parts(self._exchange_parts(call, part), dtype, reduction.op, reduction.after)


def _place(result: Array, out: Array | None) -> Array:
    """The result itself, or `out` with its values."""
    if out is None:
        return result
    target = as_result(out, result.shape, result.dtype)
    target[...] = result
    return target
