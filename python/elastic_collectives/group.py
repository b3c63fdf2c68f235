"""What a group is, whoever implements it: the ranks of one generation and the collectives among them.

Arrays are anything numpy can view without a copy. One collective at a time per group, from one thread; `abort` and
`close` from any thread. After any error a group can no longer be used. This is the interface for other backends, such
as NCCL: a backend implements `Group`, and a function like `connect` returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]
Watch = Callable[[float, Sequence[int]], None]
"""Hears for how many seconds a rank has been waiting, and for which ranks."""


class Group(Protocol):
    """The collectives. All raise `CollectiveError`; every wait ends after the group's timeout."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def members(self) -> Sequence[int]:
        """What its ranks are in the group that `connect` made: for a subgroup of some of them not 0, 1, and so on."""
        ...

    @property
    def fence(self) -> tuple[int, int]:
        """(attempt, generation)."""
        ...

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

        array: C-contiguous and writable, of a dtype in operands.DTYPES; dtype and shape are the same on all ranks.
        op: sum, average, min, max, product or adasum. Integers wrap around and their average is rounded towards zero; a
        bool's sum and max are "or", its min and product "and"; 16-bit floats are accumulated as float32.
        algorithm: auto, ring (large arrays) or bcube (small ones). dtype: "bfloat16" if the array's uint16 are such.
        weight: of this rank's array in an average, such as its number of rows; an array of weight 0 is not read.
        scale: factors for the array before, and for the result. compression: "fp16" or "bf16": float32 travels so.
        """
        ...

    def grouped_allreduce(
        self,
        arrays: Sequence[Any],
        op: str = "sum",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
    ) -> None:
        """`allreduce` of several arrays, in place, as one exchange for each dtype among them."""
        ...

    def reducescatter(
        self,
        array: Any,
        op: str = "sum",
        dtype: str | None = None,
        weight: float | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        compression: str | None = None,
    ) -> Array:
        """This rank's rows of the result of `allreduce`, summed in rank order; `array` is not changed.

        The first dimension is cut evenly; if it does not divide, the first ranks get one row more. No adasum.
        """
        ...

    def broadcast(self, array: Any, root: int) -> None:
        """Copy `array` of rank `root` to all, in place; any dtype, with the same dtype and size on all ranks."""
        ...

    def alltoall(self, array: Any, splits: Sequence[int] | None = None) -> tuple[Array, list[int]]:
        """Send rank r the r-th part of the first dimension; returns the parts received, in rank order, and their rows.

        splits: rows for each rank; None: equal parts, and the first dimension must divide. The other dimensions and
        the dtype are the same on all ranks.
        """
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

    def buffer(self, nbytes: int) -> Array:
        """Memory for operands, as zero bytes: large operands that lie there on all ranks are reduced without a copy.

        All ranks must call it in the same order as collectives. The memory lives as long as the array or a view of it,
        but belongs to this group: once the group has failed or is closed, copy what you need and use the next group's.
        """
        ...

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        ...

    @property
    def timeout(self) -> float:
        """Seconds that one wait for a peer may last, unless `limit` says otherwise."""
        ...

    def limit(self, seconds: float | None) -> None:
        """One wait for a peer may last so long from now on, and one that is under way as if it had begun now.

        None: without end, but for abort, a peer's death and the end of the group. Of this rank alone, in collectives of
        this group alone. Any thread.
        """
        ...

    def watch(self, called: Watch | None) -> None:
        """Who is called, a few times a second, while a collective of this rank has to wait for more than two seconds.

        By the thread that waits; what it raises ends the group. Ranks that wait for others themselves are not among
        those that it is told, and of several ranks on a host one alone is told. Any thread.
        """
        ...

    def subgroup(self, channel: int, ranks: Sequence[int] | None = None) -> Group:
        """A group beside this one, of the same generation, with collectives in an order of its own.

        channel: tells it from others, 1 or more; the same on all its ranks, and used once per generation and rank.
        ranks: those of this group that are in it, ascending; None: all. Nothing is exchanged before its first
        collective. Whatever ends this group ends it; it does not end this group. Any thread.
        """
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
