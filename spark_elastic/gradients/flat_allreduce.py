"""Several arrays in one buffer, so that one allreduce per dtype sums all of them. Knows no framework.

The thread that fills a buffer owns it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
ALIGN = 64  # bytes: every array begins at a multiple of it


def allocate_aligned(nbytes: int) -> Bytes:
    whole = np.zeros(nbytes + ALIGN, np.uint8)
    begin = -whole.ctypes.data % ALIGN
    return whole[begin : begin + nbytes]


class FlatBuffer:
    """Arrays of given shapes and dtypes in one piece of memory; those of one dtype lie next to each other."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[npt.DTypeLike],
        allocate: Callable[[int], Bytes] = allocate_aligned,
    ) -> None:
        """allocate: returns that many bytes, from a multiple of ALIGN on; for example `Group.buffer`."""
        kinds = [np.dtype(dtype) for dtype in dtypes]
        spans: dict[int, tuple[int, int]] = {}  # by array: its first byte, and the one behind its last
        ranges: dict[np.dtype[Any], tuple[int, int]] = {}  # by dtype: the same of all its arrays
        end = 0
        for kind in dict.fromkeys(kinds):
            begin = last = end
            for index, shape in enumerate(shapes):
                if kinds[index] == kind:
                    last = end + math.prod(shape) * kind.itemsize
                    spans[index] = end, last
                    end = -(-last // ALIGN) * ALIGN
            ranges[kind] = begin, last
        memory = allocate(end)
        # One flat array per dtype: what collectives take. Between the views lie up to ALIGN - 1 bytes of padding.
        self.flat: list[Array] = [memory[begin:end].view(kind) for kind, (begin, end) in ranges.items()]
        # One array per shape, in the order of `shapes`: the same memory as `flat`.
        pieces = [memory[slice(*spans[index])] for index in range(len(kinds))]
        forms = zip(pieces, kinds, shapes, strict=True)
        self.views: list[Array] = [piece.view(kind).reshape(shape) for piece, kind, shape in forms]

    def fill(self, arrays: Sequence[Array | None]) -> None:
        """Copy arrays in; None stands for zeros."""
        for view, array in zip(self.views, arrays, strict=True):
            if array is None:
                view.fill(0)
            else:
                np.copyto(view, array, casting="same_kind")

    def allreduce(self, group: Group, op: str = "sum", compression: str | None = None) -> None:
        """Reduce all arrays in place over the ranks of `group`; an empty dtype takes no collective. compression: the
        wire format of float32; other dtypes travel as they are."""
        for flat in self.flat:
            if len(flat):
                group.allreduce(flat, op=op, compression=compression if flat.dtype == np.float32 else None)


class FlatAllreduce:
    """Sums arrays of fixed shapes over the ranks, in the shared memory of a group."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> None:
        """dtypes: of each array; what is not float64 is summed as float32."""
        self._shapes = list(shapes)
        self._dtypes = ["float64" if dtype == "float64" else "float32" for dtype in dtypes]
        self.layout_hash = zlib.crc32(repr((self._shapes, self._dtypes)).encode())
        self._group: Group | None = None  # the group that owns the memory of `_buffer`
        self._buffer: FlatBuffer | None = None

    def allreduce(self, group: Group, arrays: Sequence[Array | None], wire: str | None) -> list[Array]:
        """Return the sums over all ranks, in rank order. The next call overwrites them. arrays: None stands for zeros.
        wire: the wire format of float32; None: as it is."""
        if self._buffer is None or group is not self._group:
            # All ranks do so at the same place among their collectives, as `Group.buffer` demands.
            self._buffer, self._group = FlatBuffer(self._shapes, self._dtypes, group.buffer), group
        self._buffer.fill(arrays)
        if group.size > 1:
            self._buffer.allreduce(group, compression=wire)
        return self._buffer.views

    def close(self) -> None:
        self._group = self._buffer = None
