"""What a forward pass changes besides gradients: running statistics and seeds (R3, R9). Main thread only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.keras.train.state import value_of
from spark_elastic.training.coupling import sentence

Array = npt.NDArray[Any]
_SEED = "seed_generator_state"


class Moving:
    """Variables that layers themselves write, such as BatchNorm's statistics.

    They are averaged over the ranks by rows, and put back where a step is given up. Seeds of random layers follow from
    a key alone, so that nothing of them need be kept.
    """

    def __init__(self, model: Any) -> None:
        frozen = {id(v) for layer in model._flatten_layers() if not layer.trainable for v in layer.weights}
        self.variables = [
            v
            for v in model.non_trainable_variables
            if id(v) not in frozen and np.dtype(_numpy_dtype(v)).kind == "f" and not v.path.endswith(_SEED)
        ]
        self._seeds = [v for v in model.variables if v.path.endswith(_SEED)]
        self._before: list[Array] = []

    def begin(self, *key: int) -> None:
        """Keep what there is, and draw by `key` from here on."""
        self._before = [np.array(value_of(v)) for v in self.variables]
        for number, seed in enumerate(self._seeds):
            drawn = hashlib.sha256(repr((*key, number)).encode()).digest()
            seed.assign(np.array([int.from_bytes(drawn[:4], "little") >> 1, 0]))

    def moved(self, weight: float) -> tuple[list[Array | None], list[bool]]:
        """Each variable times this rank's share of the step's rows, and whether it was written to."""
        now = [np.asarray(value_of(v)) for v in self.variables]
        written = [not np.array_equal(a, b) for a, b in zip(now, self._before, strict=True)]
        return [value * np.asarray(weight, value.dtype) if weight else None for value in now], written

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._before, strict=True):
            variable.assign(value)

    def apply(self, means: list[Array], written: Array) -> None:
        for variable, mean, changed in zip(self.variables, means, written, strict=True):
            if changed:
                variable.assign(mean)


def world_dependence(model: Any) -> str | None:
    """R9: one sentence that names the layers that make the weights depend on the number of workers, or None."""
    return sentence(_dependent(model))


def _dependent(model: Any) -> Iterator[tuple[str, str]]:
    for layer in model._flatten_layers(include_self=False):
        if not layer.trainable:
            continue
        if type(layer).__name__ == "BatchNormalization":
            yield layer.name, "BatchNormalization: statistics of each worker's own rows"
        elif any(v.path.endswith(_SEED) for v in layer.variables) and not list(layer._layers):
            yield layer.name, f"{type(layer).__name__}: random in each worker"


def _numpy_dtype(variable: Any) -> str:
    return "float32" if variable.dtype == "bfloat16" else str(variable.dtype)
