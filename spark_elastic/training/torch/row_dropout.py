"""`RowDropout`: random numbers that belong to rows, and not to the worker that computes them. Training thread only."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.plan import draw_uniform
from spark_elastic.errors import InvalidInput


class RowDropout(torch.nn.Module):
    """As torch.nn.Dropout over inputs of shape (rows, ...), drawn from the numbers of the rows (R9, scope of P2).

    The estimators call `draw_rows` before each forward pass; a hand-written loop must call it itself.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise InvalidInput(f"RowDropout takes a probability within 0 and 1, without 1; got {p}.")
        self.p = p
        self._words: tuple[int, ...] = ()
        self._rows: npt.NDArray[np.int64] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self._rows is None or len(self._rows) != len(x):
            count = "none" if self._rows is None else str(len(self._rows))
            raise InvalidInput(
                f"RowDropout got {len(x)} rows, draw_rows() was called for {count}: call it before each forward pass."
            )
        numbers = draw_uniform(self._rows, math.prod(x.shape[1:]), *self._words).reshape(x.shape)
        return x * torch.from_numpy((numbers >= self.p) / (1.0 - self.p)).to(x)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def draw_rows(model: torch.nn.Module, rows: npt.NDArray[np.int64], *words: int) -> None:
    """Set what the RowDropouts of a model draw from in the next forward pass. Two layers draw differently.

    Args:
        rows: (n,) row numbers.
        words: such as seed, epoch and step.
    """
    for number, module in enumerate(m for m in model.modules() if isinstance(m, RowDropout)):
        module._words, module._rows = (*words, number), rows


def exchanges_statistics(module: torch.nn.Module) -> bool:
    """Whether a layer exchanges statistics with the other ranks in each forward pass, as `SyncBatchNorm` does."""
    return bool(getattr(module, "exchanges_statistics", False))
