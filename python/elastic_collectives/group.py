"""A group: the ranks of one generation and the collectives among them.

Arrays are anything that numpy can view without a copy. A group runs one collective at a time, from one thread; any
thread may call `abort` and `close`. After an error a group cannot be used again. Another backend subclasses `Group` and
offers a function like `connect` that returns it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from elastic_collectives.operands import Array, Reduction, as_array, as_reduction, fuse_reductions

WaitObserver = Callable[[float, Sequence[int]], None]
"""Called with the seconds that this rank has been waiting and the ranks that it waits for."""

T = TypeVar("T", bound="Closing")


class Closing(ABC):
    """A context manager that calls `close` at the end of the `with` block."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Group(Closing):
    """Collectives raise `CollectiveError`; every wait ends after the group's timeout."""

    rank: int
    size: int
    members: Sequence[int]
    """Each rank's number in the group that `connect` built; differs from 0, 1, ... for a subgroup of some ranks."""
    fence: tuple[int, int]
    """(attempt, generation)."""
    timeout: float
    """Seconds that one wait for a peer may last, unless `set_timeout` changed it."""

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
        """Reduce `array` over all ranks, in place; identical bits everywhere.

        Args:
            array: C-contiguous and writable, of a dtype in operands.DTYPES; same dtype and shape on all ranks.
            op: sum, average, min, max, product or adasum. Integers wrap around and their average is truncated towards
                zero; for bool, sum and max mean "or", min and product mean "and"; 16-bit floats are accumulated as
                float32.
            algorithm: auto, ring (for large arrays) or bcube (for small ones).
            dtype: "bfloat16" if the array is uint16 that holds bfloat16.
            weight: of this rank's array in an average, such as its number of rows; an array of weight 0 is not read.
            scale: factors on the operand and on the result.
            compression: "fp16" or "bf16": float32 is sent in this format.
        """
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
        """`allreduce` several arrays in place, with one exchange per dtype."""
        views = [as_array(array, writable=True) for array in arrays]
        whole = [as_reduction(view, op, dtype, weight, scale, compression) for view in views]
        for reduction in fuse_reductions(whole):
            self._allreduce(reduction)

    @abstractmethod
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
        """Return this rank's rows of the result of `allreduce`, summed in rank order; `array` is not changed.

        The first dimension is split evenly; if it does not divide, the first ranks get one row more. No adasum.

        Args:
            out: the array that receives the result, C-contiguous and of its shape and dtype; None: a new one.
        """

    @abstractmethod
    def broadcast(self, array: Any, root: int) -> None:
        """Copy `array` of rank `root` to all, in place; any dtype, with the same dtype and size on all ranks."""

    @abstractmethod
    def alltoall(
        self,
        array: Any,
        splits: Sequence[int] | None = None,
        out: Array | None = None,
        incoming: Sequence[int] | None = None,
    ) -> tuple[Array, list[int]]:
        """Send rank r the r-th part of the first dimension; returns the parts received, in rank order, and their rows.

        Args:
            array: its dtype and all but the first dimension must be equal on all ranks.
            splits: rows for each rank; None: equal parts, and the first dimension must divide.
            incoming: rows from each rank, if all ranks know them, which saves a round trip. A rank that sends another
                number than its receiver expects is a mismatch.
            out: as in `reducescatter`.
        """

    @abstractmethod
    def alltoall_arrays(self, arrays: Sequence[Array], out: Sequence[Array]) -> None:
        """Send the r-th array to rank r, and receive into the r-th array of `out` what it sends.

        Where sender and receiver have arrays of another size it is a mismatch. All arrays have one dtype.
        """

    @abstractmethod
    def allgather(self, array: Any, out: Array | None = None) -> Array:
        """Return the arrays of all ranks (equal shape and dtype) as one array of shape (size, *array.shape).

        Args:
            out: as in `reducescatter`.
        """

    @abstractmethod
    def allgatherv(self, array: Any) -> list[Array]:
        """Return the arrays of all ranks in rank order; the first dimension may differ between ranks."""

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks in rank order; lengths may differ."""
        return [part.tobytes() for part in self.allgatherv(np.frombuffer(data, np.uint8))]

    @abstractmethod
    def buffer(self, nbytes: int) -> Array:
        """Allocate zeroed memory for operands: large operands in it, on all ranks, are reduced without a copy.

        All ranks must call this in the same order as collectives. The memory lives as long as the array or a view of
        it, but belongs to this group: after a failure or `close`, copy what you need and use the next group's memory.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once all ranks have called it."""

    @abstractmethod
    def set_timeout(self, seconds: float | None) -> None:
        """Set how long one wait for a peer may last; a wait under way counts as if it began now.

        With None a wait ends only by abort, by the death of a peer or with the group. Applies to this rank and this
        group only. Any thread.
        """

    @abstractmethod
    def watch(self, callback: WaitObserver | None) -> None:
        """Set a callback for collectives of this rank that wait longer than two seconds; called a few times a second.

        The waiting thread calls it; an exception from it ends the group. The ranks passed to it do not include ranks
        that wait themselves, and only one of several waiting ranks on a host is called. Any thread.
        """

    @abstractmethod
    def subgroup(self, channel: int, ranks: Sequence[int] | None = None) -> Group:
        """Create another group of the same generation whose collectives are ordered independently.

        Nothing is exchanged before its first collective. The end of this group ends the subgroup, not vice versa. Any
        thread.

        Args:
            channel: identifies the subgroup, 1 or more; equal on all its ranks, used once per generation and rank.
            ranks: members among the ranks of this group, ascending; None: all.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Fail the group at once, here and at all reachable peers; any thread, any number of times."""

    @abstractmethod
    def _allreduce(self, reduction: Reduction) -> None:
        """In place; its weight, if it has one, is this rank's own yet: see `_resolve_weight`."""

    def _resolve_weight(self, reduction: Reduction) -> Reduction:
        """Gather the ranks' weights and turn a weighted average into a sum with a factor per rank."""
        if reduction.weight is None:
            return reduction
        weights = self.allgather(np.array([reduction.weight], np.float64))
        return reduction.with_weights(weights.ravel().tolist(), self.rank)
