"""Columns of a step as the tensors that model and loss take: shapes and dtypes, without a copy where both fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.training.share import Share
from spark_elastic.training.transformation import transformed


class Columns:
    """Which columns are what. features: as the model sees them (their shapes may differ from the stored ones)."""

    def __init__(
        self,
        features: tuple[Column, ...],
        labels: tuple[str, ...],
        weight: str | None,
        dtype: torch.dtype,
        label_shapes: tuple[tuple[int, ...], ...] | None = None,
        transformation: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        """dtype: of the model's floating point parameters; floating point columns are cast to it. transformation: of
        arrays by column, (rows, *shape) each; what it returns is taken in the shapes that it has."""
        self._features = features
        self._labels = labels
        self._weight = weight
        self._wanted = [c.name for c in features] + [*labels, *filter(None, [weight])]
        self._shared = {c.name for c in features} & set(labels)  # columns that are both
        self._dtype = dtype
        self._label_shapes = label_shapes
        self._transformation = transformation

    def share(self, rows: StepRows) -> Share[torch.Tensor]:
        columns = transformed(rows, self._wanted, self._transformation)
        return Share(
            planned=rows.planned,
            row_ids=rows.row_ids,
            features=tuple(self._feature(columns[c.name], c.shape) for c in self._features),
            labels=self._label_tensors(columns),
            weights=None if self._weight is None else self._tensor(columns[self._weight]).to(self._dtype),
        )

    def _feature(self, array: npt.NDArray[Any], shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensor(array)
        return tensor if self._transformation is not None else tensor.reshape(-1, *shape)

    def _label_tensors(self, columns: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        tensors = tuple(self._label(name, columns[name]) for name in self._labels)
        if self._label_shapes is None:
            return tensors
        return tuple(t.reshape(-1, *s) for t, s in zip(tensors, self._label_shapes, strict=True))

    def _label(self, name: str, array: npt.NDArray[Any]) -> torch.Tensor:
        """Of its own memory where the column is a feature, too, which a model may write to."""
        tensor = self._tensor(array)
        return tensor.clone() if name in self._shared else tensor

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Floating point numbers in the model's dtype, integers as int64, as class labels and indices are."""
        tensor = torch.from_numpy(array)
        if tensor.is_floating_point():
            return tensor.to(self._dtype)
        return tensor if tensor.dtype is torch.bool else tensor.to(torch.int64)
