"""Dropout drawn by the row and the step, not by the worker that has it (R9). Training thread only."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.plan import draws
from spark_elastic.errors import InvalidInput


class RowDropout(torch.nn.Module):
    """As torch.nn.Dropout over inputs of shape (rows, ...), drawn for each row from a number of its own.

    A training knows the rows: in `TorchTrainTask` they are told to it; a loop of one's own calls `draw_rows` before
    each forward pass.
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
            told = "none" if self._rows is None else str(len(self._rows))
            raise InvalidInput(
                f"RowDropout got {len(x)} rows and was told of {told}: call draw_rows() before each forward pass."
            )
        numbers = draws(self._rows, math.prod(x.shape[1:]), *self._words).reshape(x.shape)
        return x * torch.from_numpy((numbers >= self.p) / (1.0 - self.p)).to(x)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def draw_rows(model: torch.nn.Module, rows: npt.NDArray[np.int64], *words: int) -> None:
    """Tell the model's RowDropouts what the next forward pass draws from: (n,) row numbers, and words such as (seed,
    epoch, step); two layers draw differently."""
    for number, module in enumerate(m for m in model.modules() if isinstance(m, RowDropout)):
        module._words, module._rows = (*words, number), rows
