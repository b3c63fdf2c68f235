"""A trained module as a function of columns: what each Python worker of Spark runs for `transform`.

Shipped in a broadcast, whose value Spark keeps per Python worker, so that the module is loaded once per worker and
not once per batch or task. Knows pandas and torch; of Spark only what its caller hands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.persistence import Packed

ROWS_AT_ONCE = 512  # bounds the memory of activations; Arrow's batches have 10,000 rows


@dataclass(frozen=True)
class Predictor:
    """Rows in, predictions out; the module runs in evaluation mode without gradients."""

    packed: Packed
    columns: tuple[Column, ...]

    @cached_property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.packed.unpack()
        return model.eval()

    @cached_property
    def _dtype(self) -> torch.dtype:
        floats = (p.dtype for p in self._model.parameters() if p.is_floating_point())
        return next(floats, torch.get_default_dtype())

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """As in training: floating point numbers in the model's dtype, whole ones as int64."""
        tensor = torch.from_numpy(np.array(values))
        if tensor.is_floating_point():
            return tensor.to(self._dtype)
        return tensor if tensor.dtype is torch.bool else tensor.to(torch.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {"packed": self.packed, "columns": self.columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def widths(self) -> list[int]:
        """Numbers per row of each output of the model, tried on one row of zeros."""
        outputs = self._forward([np.zeros((1, *c.shape), c.dtype) for c in self.columns])
        return [int(output.shape[1]) for output in outputs]

    def predict(self, columns: Sequence[Sequence[Any]]) -> list[npt.NDArray[np.float64]]:
        """columns: for each input column its rows. Returns (rows, width) for each output of the model."""
        inputs = [_stacked(rows, column) for rows, column in zip(columns, self.columns, strict=True)]
        rows = len(inputs[0])
        parts = [
            self._forward([values[start : start + ROWS_AT_ONCE] for values in inputs])
            for start in range(0, rows, ROWS_AT_ONCE)
        ]
        if not parts:
            return [np.zeros((0, width)) for width in self.widths()]
        return [np.concatenate(output) for output in zip(*parts, strict=True)]

    def _forward(self, inputs: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[np.float64]]:
        with torch.inference_mode():
            output = self._model(*(self._tensor(values) for values in inputs))
        outputs = output if isinstance(output, tuple | list) else [output]
        for each in outputs:
            if not isinstance(each, torch.Tensor):
                raise InvalidInput(
                    f"transform needs a model that returns tensors; this one returns {type(each).__name__}."
                )
        return [each.reshape(len(inputs[0]), -1).to(torch.float64).numpy() for each in outputs]


def _stacked(rows: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    """Rows of numbers or (nested) lists as one array (rows, *shape). A null in a float column is NaN."""
    if not column.shape:
        values = np.asarray(rows)
        # pandas hands an integer column with nulls over as floats with NaN.
        if values.dtype == object or (np.dtype(column.dtype).kind in "iub" and np.isnan(values).any()):
            raise _nulls(column)
        return values.astype(column.dtype)
    size = int(np.prod(column.shape, dtype=np.int64))
    plain = [row for row in rows if isinstance(row, np.ndarray) and row.dtype != object and row.size == size]
    if len(plain) == len(rows) > 0:  # as Arrow hands arrays over
        return np.concatenate(plain).reshape(len(plain), *column.shape).astype(column.dtype, copy=False)
    stacked = np.empty((len(rows), size), dtype=column.dtype)
    for number, row in enumerate(rows):
        if row is None:
            raise _nulls(column)
        flat = _flat(row)
        if len(flat) != size:
            raise InvalidInput(
                f"column {column.name!r} has a row of {len(flat)} numbers; the model was trained on {size}."
            )
        stacked[number] = flat
    return stacked.reshape(len(rows), *column.shape)


def _flat(row: Any) -> npt.NDArray[Any]:
    array = np.asarray(row)
    return np.concatenate([_flat(part) for part in array]) if array.dtype == object else array.reshape(-1)


def _nulls(column: Column) -> InvalidInput:
    return InvalidInput(f"column {column.name!r} has nulls: fill or drop them before transform.")
