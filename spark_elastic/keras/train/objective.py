"""What a Keras model minimises, as sums over rows, so that any split of a step's rows gives the same gradient (R8).

Loss objects are those that the model was compiled with; their reduction is taken over by the sums here. Main thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.training.spec import LocalBatch

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclass(frozen=True)
class _Part:
    """One output's loss. reduction: what the user chose."""

    path: tuple[Any, ...]
    loss: Any
    weight: float
    name: str
    reduction: str


class CompiledLosses:
    """Losses of one compiled model."""

    def __init__(self, model: Any, labels: Any, outputs: Any) -> None:
        """labels, outputs: of one row, in the structure of the model's outputs; they settle which loss is whose."""
        self._model = model
        compiled = model._compile_loss
        if not compiled.built:
            try:
                compiled.build(labels, outputs)
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidInput(f"the loss does not fit the model's outputs: {error}") from error
        self._dtype = compiled.dtype
        self._parts = [_part(*found) for found in compiled._flat_losses]
        for part in self._parts:
            if getattr(_at(part.path, outputs), "_keras_mask", None) is not None:
                raise InvalidInput(
                    f"the output of loss {part.name!r} carries a mask, whose number of elements is known only behind "
                    "the forward pass: weight the rows with sample_weight_col, or end the mask before the output."
                )

    @property
    def names(self) -> list[str]:
        """Of the losses that the history tells one by one."""
        return [f"{part.name}_loss" for part in self._parts] if len(self._parts) > 1 else []

    def factors(self, group: Group, share: LocalBatch[npt.NDArray[Any]]) -> list[float]:
        """What each loss's sum is to be multiplied with; agreed on by all ranks where row weights divide it."""
        everywhere = float(share.planned)
        if share.weights is not None and any(p.reduction == "mean_with_sample_weight" for p in self._parts):
            own = np.array([share.weights.sum(dtype=np.float64)])
            everywhere = float(group.allgather(own).sum()) or 1.0
        divisors = {"sum": 1.0, "mean_with_sample_weight": everywhere}
        return [1.0 / divisors.get(part.reduction, float(share.planned)) for part in self._parts]

    def total(
        self, labels: Any, outputs: Any, weights: Any, factors: Any, part: Any
    ) -> tuple[Any, list[Any]]:
        """(these rows' part of the step's loss, each loss's own part). part: these rows' share of the step's rows.

        Called while TensorFlow traces.
        """
        own = [
            self._sum(p, labels, outputs, weights) * tf.cast(factors[k], p.loss.dtype)
            for k, p in enumerate(self._parts)
        ]
        total = sum(tf.cast(o, self._dtype) * p.weight for o, p in zip(own, self._parts, strict=True))
        for extra in self._model.losses:  # means over rows, and penalties of weights
            total += tf.reduce_sum(tf.cast(extra, self._dtype)) * tf.cast(part, self._dtype)
        return total, own

    def _sum(self, part: _Part, labels: Any, outputs: Any, weights: Any) -> Any:
        label, output = _at(part.path, labels), _at(part.path, outputs)
        values = part.loss(label, output, sample_weight=weights)
        rows = tf.cast(tf.shape(tf.nest.flatten(output)[0])[0], part.loss.dtype)
        if values.shape.rank == 0:  # a function of the user's that takes the mean itself
            return values * rows if part.reduction in MEANS else values
        summed = tf.reduce_sum(values)
        if part.reduction == "sum" or (part.reduction == "mean_with_sample_weight" and weights is not None):
            return summed
        return summed * rows / tf.cast(tf.size(values), part.loss.dtype)


def _part(path: tuple[Any, ...], loss: Any, weight: float | None, name: str) -> _Part:
    chosen = loss.reduction
    if chosen not in (*MEANS, "sum"):
        raise InvalidInput(f"loss {name!r} has reduction={chosen!r}: choose sum_over_batch_size or sum.")
    # The model's own goes on as the user compiled it. Keras's `copy` would look for a user's function by its name.
    summed = object.__new__(type(loss))
    vars(summed).update(vars(loss), reduction="none")
    return _Part(path, summed, 1.0 if weight is None else float(weight), name, chosen)


def _at(path: Sequence[Any], structure: Any) -> Any:
    for key in path:
        if keras.tree.is_nested(structure):
            structure = structure[key]
    return structure
