"""Random numbers of single rows, for augmentation: the same whichever worker takes a row, beside whatever others.

What a row draws depends on the fit's seed, the epoch and the row's number alone, so augmented training keeps P2 (the
world's size does not change the mathematics). Numpy only; one thread uses an object.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.plan import Int64s, draw_uniform
from spark_elastic.errors import InvalidInput

_AUGMENTATION = 0x6175676D  # keeps these numbers apart from those of RowDropout and of the order of the rows


class RowRandom:
    """What a `transformation_fn` receives as `rng` in training: methods of numpy's Generator over the rows at hand.

    Each result has shape (rows, *size). The n-th call draws the same for a row wherever it is made, so make the same
    calls for all rows, not only where some condition holds.
    """

    def __init__(self, seed: int, epoch: int, row_ids: Int64s) -> None:
        self._words = (_AUGMENTATION, seed, epoch)
        self._rows = row_ids
        self._calls = 0

    def __len__(self) -> int:
        return len(self._rows)

    def uniform(
        self, low: float = 0.0, high: float = 1.0, size: int | tuple[int, ...] = ()
    ) -> npt.NDArray[np.float64]:
        """Numbers of at least `low` and below `high`."""
        return low + (high - low) * self._draw(size)

    def integers(self, low: int, high: int, size: int | tuple[int, ...] = ()) -> Int64s:
        """Whole numbers of at least `low` and below `high`."""
        if not low < high:
            raise InvalidInput(
                f"rng.integers({low}, {high}) has nothing to draw from: high must be above low."
            )
        numbers: Int64s = np.floor(low + (high - low) * self._draw(size)).astype(np.int64)
        return numbers

    def normal(
        self, loc: float = 0.0, scale: float = 1.0, size: int | tuple[int, ...] = ()
    ) -> npt.NDArray[np.float64]:
        """Numbers of the normal distribution (Box and Muller)."""
        radius = np.sqrt(-2.0 * np.log1p(-self._draw(size)))
        numbers: npt.NDArray[np.float64] = loc + scale * radius * np.cos(2.0 * math.pi * self._draw(size))
        return numbers

    def seeds(self) -> Int64s:
        """A seed for each row, of at least 0 and below 2**53, for what takes a seed or a generator of its own."""
        return (self._draw(()) * 2.0**53).astype(np.int64)

    def _draw(self, size: int | tuple[int, ...]) -> npt.NDArray[Any]:
        self._calls += 1
        shape = (size,) if isinstance(size, int) else size
        numbers = draw_uniform(self._rows, math.prod(shape), *self._words, self._calls)
        return numbers.reshape(len(self._rows), *shape)
