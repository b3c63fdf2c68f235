"""A rank's rows of one step, as arrays or tensors of the framework that trains. Values only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt


class Cuttable(Protocol):
    """An array or a tensor, cut along its rows."""

    def __getitem__(self: R, part: slice, /) -> R: ...


R = TypeVar("R", bound=Cuttable)


@dataclass(frozen=True)
class Share(Generic[R]):
    """This rank's rows of a step: features and labels (n_r, ...), weights (n_r,) or None.

    planned: rows of the step over all ranks. row_ids: (n_r,), for the ledger.
    """

    planned: int
    row_ids: npt.NDArray[np.int64]
    features: tuple[R, ...]
    labels: tuple[R, ...]
    weights: R | None

    def __len__(self) -> int:
        return len(self.row_ids)

    def micro_batches(self, rows: int) -> Iterator[Share[R]]:
        """Parts of at most `rows` rows, as even as can be: BatchNorm takes no part of a single row."""
        parts = -(-len(self) // rows)
        if parts == 1:
            yield self
            return
        for number in range(parts):
            part = slice(len(self) * number // parts, len(self) * (number + 1) // parts)
            yield Share(
                self.planned,
                self.row_ids[part],
                tuple(each[part] for each in self.features),
                tuple(each[part] for each in self.labels),
                None if self.weights is None else self.weights[part],
            )
