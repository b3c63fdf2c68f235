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
from spark_elastic.estimators.stacking import in_parts


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

    def model(self) -> torch.nn.Module:
        """A new copy of the module, in evaluation mode."""
        model: torch.nn.Module = self.packed.unpack()
        return model.eval()

    def parts(self) -> dict[str, bytes]:
        """What is saved, by name."""
        return self.packed.parts()

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
        return in_parts(self.columns, columns, self._forward, self.widths)

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
