"""Arrays of one step, summed over the world in the group's memory: gradients, and running statistics.

One buffer a group, cut by dtype, one collective each (R7). The memory belongs to the group: what is summed is copied
out before it is handed on. Training thread only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group

Array = npt.NDArray[Any]


class Exchange:
    """shapes, dtypes: of the arrays of a step, the same on all ranks; float16 and bfloat16 travel as float32."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> None:
        self._shapes = list(shapes)
        self._dtypes = ["float64" if dtype == "float64" else "float32" for dtype in dtypes]
        cut = repr((self._shapes, self._dtypes)).encode()
        self.layout_hash = zlib.crc32(cut)
        self._group: Group | None = None
        self._flat: dict[str, Array] = {}
        self._views: list[Array] = []

    def summed(self, group: Group, arrays: Sequence[Array | None], wire: str | None) -> list[Array]:
        """The sums over all ranks, in rank order; None counts as zeros. wire: how float32 travels, None for as it is.

        What is returned is overwritten by the next call.

        Raises:
            CollectiveError: the group broke; the memory is void.
        """
        self._lay(group)
        for view, array in zip(self._views, arrays, strict=True):
            if array is None:
                view.fill(0)
            else:
                np.copyto(view, array, casting="same_kind")
        if group.size > 1:
            for dtype, flat in self._flat.items():
                if len(flat):
                    group.allreduce(flat, compression=wire if dtype == "float32" else None)
        return self._views

    def close(self) -> None:
        self._group, self._flat, self._views = None, {}, []

    def _lay(self, group: Group) -> None:
        """The same on all ranks: `Group.buffer` is called in the order of collectives."""
        if group is self._group:
            return
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes]
        totals = {
            kind: sum(s for s, d in zip(sizes, self._dtypes, strict=True) if d == kind)
            for kind in ("float64", "float32")
        }
        memory = group.buffer(totals["float64"] * 8 + totals["float32"] * 4)
        end = totals["float64"] * 8
        self._flat = {"float64": memory[:end].view(np.float64), "float32": memory[end:].view(np.float32)}
        ends = dict.fromkeys(totals, 0)
        self._views = []
        for shape, size, kind in zip(self._shapes, sizes, self._dtypes, strict=True):
            self._views.append(self._flat[kind][ends[kind] : ends[kind] + size].reshape(shape))
            ends[kind] += size
        self._group = group
