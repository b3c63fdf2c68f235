"""What a group is, whoever implements it: the ranks of one generation and the collectives among them.

Arrays are anything numpy can view without a copy. One collective at a time per group, from one thread; `abort` and
`close` from any. After any error a group is of no more use. This is the seam for other backends (NCCL among them):
a backend implements `Group` and is returned by a function of `connect`'s kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES = ("float32", "float64", "int32", "int64")
OPS = ("sum", "min", "max", "product")
ALGORITHMS = ("auto", "ring", "bcube")


class Group(Protocol):
    """The collectives. All raise `CollectiveError`; every wait ends after the group's timeout."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def fence(self) -> tuple[int, int]:
        """(attempt, generation)."""
        ...

    def allreduce(self, array: Any, op: str = "sum", algorithm: str = "auto") -> None:
        """Reduce `array` over all ranks, in place; identical bits everywhere.

        array: C-contiguous and writable; float32, float64, int32 or int64; the same shape on all ranks.
        op: sum, min, max or product. algorithm: auto, ring (large arrays) or bcube (small ones).
        """
        ...

    def broadcast(self, array: Any, root: int) -> None:
        """Copy `array` of rank `root` to all, in place; any dtype, the same number of bytes on all ranks."""
        ...

    def allgather(self, array: Any) -> Array:
        """All ranks' arrays (of equal shape and dtype), as one of shape (size, *array.shape)."""
        ...

    def allgatherv(self, array: Any) -> list[Array]:
        """All ranks' arrays in rank order; they may differ in the length of their first dimension."""
        ...

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """All ranks' bytes in rank order; lengths may differ."""
        ...

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        ...

    def abort(self, reason: str) -> None:
        """Fail the group at once, here and at the peers that can be told; any thread, any number of times."""
        ...

    def close(self) -> None:
        """Give up sockets and memory."""
        ...

    def __enter__(self) -> Group: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def as_array(data: Any, writable: bool) -> Array:
    """A numpy view of `data`, never a copy.

    Raises:
        ValueError: it is not C-contiguous, or read-only where it must be written.
    """
    array = data if isinstance(data, np.ndarray) else np.asarray(data)
    if not array.flags.c_contiguous:
        raise ValueError("collectives take C-contiguous arrays; use numpy.ascontiguousarray first.")
    if writable and not array.flags.writeable:
        raise ValueError("this collective works in place and the array is read-only; pass a writable one.")
    return array


def as_operand(data: Any, op: str, algorithm: str) -> Array:
    """What an allreduce works on, once all its arguments make sense.

    Raises:
        ValueError: with the argument that does not.
    """
    view = as_array(data, writable=True)
    if view.dtype.name not in DTYPES:
        raise ValueError(f"allreduce takes {', '.join(DTYPES)}; got {view.dtype.name}.")
    if op not in OPS or algorithm not in ALGORITHMS:
        raise ValueError(
            f"op must be one of {OPS} and algorithm one of {ALGORITHMS}; got {op!r}, {algorithm!r}."
        )
    return view


def checked_root(root: int, size: int) -> None:
    """Raises ValueError unless `root` is a rank."""
    if not 0 <= root < size:
        raise ValueError(f"root must be in [0, {size}); got {root}.")


def split(gathered: Array, lengths: Sequence[int]) -> list[Array]:
    """Cut the first dimension into parts of `lengths`."""
    ends = np.cumsum(lengths)
    return [gathered[end - length : end] for end, length in zip(ends, lengths, strict=True)]
