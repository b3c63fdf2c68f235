"""Columns of a step as the tensors that model and loss take: shapes and dtypes, without a copy where both fit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.torch.training import Share


class Columns:
    """Which columns are what. features: as the model sees them (their shapes may differ from the stored ones)."""

    def __init__(
        self, features: tuple[Column, ...], labels: tuple[str, ...], weight: str | None, dtype: torch.dtype
    ) -> None:
        """dtype: of the model's floating point parameters; floating point columns are cast to it."""
        self._features = features
        self._labels = labels
        self._weight = weight
        self._dtype = dtype

    def share(self, rows: StepRows) -> Share:
        return Share(
            planned=rows.planned,
            row_ids=rows.row_ids,
            features=tuple(self._tensor(rows.columns[c.name]).reshape(-1, *c.shape) for c in self._features),
            labels=tuple(self._tensor(rows.columns[name]) for name in self._labels),
            weights=None
            if self._weight is None
            else self._tensor(rows.columns[self._weight]).to(self._dtype),
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Floating point numbers in the model's dtype, integers as int64, as class labels and indices are."""
        tensor = torch.from_numpy(array)
        if tensor.is_floating_point():
            return tensor.to(self._dtype)
        return tensor if tensor.dtype is torch.bool else tensor.to(torch.int64)
