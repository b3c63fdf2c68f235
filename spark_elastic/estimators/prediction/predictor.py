"""A trained module as a function of columns: what each Python worker of Spark runs for `transform`.

Shipped in a broadcast, whose value Spark keeps per Python worker, so that the module is loaded once per worker and
not once per batch or task. Knows pandas and torch; of Spark only what its caller hands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.persistence import Packed
from spark_elastic.estimators.prediction.devices import gpu_for
from spark_elastic.estimators.prediction.stacking import in_parts
from spark_elastic.training.input_dtype import input_dtype
from spark_elastic.training.model_output import output_parts
from spark_elastic.training.transformation import Transformation, changed


@dataclass(frozen=True)
class Transformed:
    """A module whose inputs a function makes of the feature columns; packed in the module's place."""

    module: torch.nn.Module
    transformation: Transformation


@dataclass(frozen=True)
class Predictor:
    """Rows in, predictions out; the module runs in evaluation mode without gradients.

    packed: a module, or one that is `Transformed`.
    """

    packed: Packed
    columns: tuple[Column, ...]

    def _unpacked(self) -> tuple[torch.nn.Module, Transformation | None]:
        thing = self.packed.unpack()
        if isinstance(thing, Transformed):
            return thing.module.eval(), thing.transformation
        return thing.eval(), None

    @cached_property
    def _loaded(self) -> tuple[torch.nn.Module, Transformation | None]:
        return self._unpacked()

    @property
    def needs_sample(self) -> bool:
        """What a transformation makes of zeros is anyone's guess."""
        return self._loaded[1] is not None

    @cached_property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = input_dtype(self._loaded[0].parameters(), torch.get_default_dtype())
        return found

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """As in training: floating point numbers in the model's dtype, whole ones as int64."""
        tensor = torch.from_numpy(np.array(values))
        if tensor.is_floating_point():
            return tensor.to(self._dtype)
        return tensor if tensor.dtype is torch.bool else tensor.to(torch.int64)

    def model(self) -> torch.nn.Module:
        """A new copy of the module, in evaluation mode."""
        return self._unpacked()[0]

    def parts(self) -> dict[str, bytes]:
        """What is saved, by name."""
        return self.packed.parts()

    def __getstate__(self) -> dict[str, Any]:
        return {"packed": self.packed, "columns": self.columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def widths(self, sample: Sequence[Sequence[Any]] | None = None) -> list[int]:
        """Numbers per row of each output of the model, tried on rows of zeros, or on `sample`, a row: on two and on
        three of them, since any other dimension of an output may be as long as one number of rows."""
        outputs: list[npt.NDArray[np.float64]] = []
        for rows in (2, 3):
            if sample is not None:
                outputs = self.predict([[*values] * rows for values in sample])
            else:
                outputs = self._forward([np.zeros((rows, *c.shape), c.dtype) for c in self.columns])
        return [int(output.shape[1]) for output in outputs]

    def predict(
        self, columns: Sequence[Sequence[Any]], gpus: Sequence[str] = ()
    ) -> list[npt.NDArray[np.float64]]:
        """columns: for each input column its rows. Returns (rows, width) for each output of the model."""
        number = gpu_for(gpus, torch.cuda.device_count())
        forward = partial(self._forward, device="cpu" if number is None else f"cuda:{number}")
        return in_parts(self.columns, columns, forward, self.widths)

    def _forward(
        self, inputs: Sequence[npt.NDArray[Any]], device: str = "cpu"
    ) -> list[npt.NDArray[np.float64]]:
        module = self._loaded[0].to(device)  # where it is there already, nothing happens
        given = changed(inputs, self.columns, self._loaded[1])
        with torch.inference_mode():
            output = module(*(self._tensor(values).to(device) for values in given))
        outputs = output_parts(output)
        # What transformers' models keep for themselves (a cache) is no prediction.
        if isinstance(output, Mapping):
            outputs = tuple(each for each in outputs if isinstance(each, torch.Tensor)) or outputs
        for each in outputs:
            if not isinstance(each, torch.Tensor):
                raise InvalidInput(
                    "transform needs a model that returns tensors, or a tuple, list or dict of them; this one returns "
                    f"{type(each).__name__}."
                )
            if not each.ndim or len(each) != len(inputs[0]):
                raise InvalidInput(
                    "transform needs outputs whose first dimension is the rows; this model returns "
                    f"{tuple(each.shape)} for {len(inputs[0])} rows: leave that output out, or turn it."
                )
        return [each.reshape(len(inputs[0]), -1).to(torch.float64).cpu().numpy() for each in outputs]
