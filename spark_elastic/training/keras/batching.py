"""Columns of a step as the arrays that a Keras model takes: order, shapes, dtypes. Any thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.data.transformation import check_numbers
from spark_elastic.errors import InvalidInput
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.spec import FitConfig


def order_features(model: Any, columns: Sequence[str]) -> list[str]:
    """In the order of the model's inputs, if it has any. Raises InvalidInput: they are a dict of other keys."""
    tensors = list(getattr(model, "inputs", None) or ())
    structure = getattr(model, "input", None) if tensors else None
    return _order_columns(columns, structure, [tensor.name for tensor in tensors], "feature_cols", "inputs")


def order_labels(model: Any, outputs: Any, columns: Sequence[str]) -> list[str]:
    """In the order of the outputs, which a call returned or which are symbolic. Raises InvalidInput as above."""
    names = list(getattr(model, "output_names", None) or ())
    return _order_columns(columns, outputs, names, "label_cols", "outputs")


def _order_columns(
    columns: Sequence[str], structure: Any, names: Sequence[str], parameter: str, what: str
) -> list[str]:
    if isinstance(structure, Mapping) and len(structure) > 1:
        places = keras.tree.pack_sequence_as(structure, list(range(len(keras.tree.flatten(structure)))))
        if set(places) != set(columns) or not all(isinstance(place, int) for place in places.values()):
            raise InvalidInput(
                f"the model's {what} are a dict of {', '.join(map(str, structure))} and {parameter} names "
                f"{', '.join(columns)}: give the columns the names of the keys, one each."
            )
        return sorted(places, key=places.__getitem__)
    named = len(names) > 1 and len(names) == len(columns) and set(names) == set(columns)
    return list(names) if named else list(columns)


def pack_inputs(model: Any, arrays: Sequence[Any]) -> Any:
    """The arrays, in the order of the model's inputs, as a call of the model takes them."""
    nested = getattr(model, "input", None) if getattr(model, "inputs", None) else None
    if nested is not None:
        return keras.tree.pack_sequence_as(nested, list(arrays))
    return arrays[0] if len(arrays) == 1 else list(arrays)


Array = npt.NDArray[Any]
STRINGS = "object"  # numpy's dtype of what TensorFlow calls strings


@dataclass(frozen=True)
class Inputs:
    columns: tuple[Column, ...]  # as the model sees them, in the order of its inputs
    dtypes: tuple[str, ...]  # of each input; (): those of the arrays
    shapes: tuple[tuple[int, ...], ...]  # of one row of each input; (): those of the arrays

    @classmethod
    def of(cls, model: Any, features: Sequence[Column], free: bool = False) -> Inputs:
        """By the names of the model's inputs where all columns have such names, else in the columns' order.
        free: the user's transformation chooses the shapes."""
        tensors = list(getattr(model, "inputs", None) or ())
        by_name = {column.name: column for column in features}
        columns = tuple(by_name[name] for name in order_features(model, list(by_name)))
        if not tensors:  # a class of its own, which takes what comes
            kinds = () if free else tuple(_plain_dtype(c.dtype) for c in columns)
            return cls(columns, kinds, () if free else tuple(c.shape for c in columns))
        shapes = tuple(_choose_shape(c.shape, t.shape[1:]) for c, t in zip(columns, tensors, strict=True))
        dtypes = tuple(STRINGS if t.dtype == "string" else str(t.dtype) for t in tensors)
        return cls(columns, dtypes, () if free else shapes)

    def arrays(self, columns: Mapping[str, Any]) -> tuple[Array, ...]:
        arrays = [np.asarray(columns[c.name]) for c in self.columns]
        if self.shapes:
            arrays = [a.reshape(len(a), *s) for a, s in zip(arrays, self.shapes, strict=True)]
        dtypes = self.dtypes or tuple(_plain_dtype(str(a.dtype)) for a in arrays)
        for column, array, dtype in zip(self.columns, arrays, dtypes, strict=True):
            if dtype != STRINGS:
                check_numbers(column.name, array)
        return tuple(a.astype(dtype, copy=False) for a, dtype in zip(arrays, dtypes, strict=True))


class BatchBuilder:
    def __init__(
        self,
        config: FitConfig,
        inputs: Inputs,
        labels: Sequence[str],
        class_weight: Mapping[int, float] | None,
    ) -> None:
        self._inputs, self._labels, self._weight = inputs, tuple(labels), config.data.sample_weight_col
        shapes = config.data.label_shapes
        self._shapes = None if shapes is None else dict(zip(config.data.label_cols, shapes, strict=True))
        self._class_weight = class_weight

    def build(self, rows: StepRows) -> LocalBatch[Array]:
        columns = rows.columns
        labels = tuple(self._label(name, np.asarray(columns[name])) for name in self._labels)
        weights = None if self._weight is None else np.asarray(columns[self._weight], keras.config.floatx())
        if self._class_weight is not None:
            by_class = compute_class_weights(labels[0], self._class_weight)
            weights = by_class if weights is None else weights * by_class
        return LocalBatch(rows.planned, rows.row_ids, self._inputs.arrays(columns), labels, weights)

    def _label(self, name: str, values: Array) -> Array:
        check_numbers(name, values)
        if self._shapes is not None:
            values = values.reshape(len(values), *self._shapes[name])
        return values.astype(keras.config.floatx(), copy=False) if values.dtype.kind == "f" else values


def compute_class_weights(labels: Array, weights: Mapping[int, float]) -> Array:
    """(n,): each row's weight by its class, an index or a row of indicators; 1 for classes that are not named."""
    classes = labels.argmax(-1) if labels.ndim > 1 and labels.shape[-1] != 1 else labels.reshape(len(labels))
    found = np.ones(len(labels), keras.config.floatx())
    for number, weight in weights.items():
        found[np.round(classes).astype(np.int64) == number] = weight
    return found


def _choose_shape(shape: tuple[int, ...], wanted: Sequence[int | None]) -> tuple[int, ...]:
    """The shape that the model wants, where the row's numbers fill it; else the row's own."""
    known = tuple(size for size in wanted if size is not None)
    if len(known) == len(wanted) and math.prod(known) == math.prod(shape):
        return known
    return shape


def _plain_dtype(dtype: str) -> str:
    kind = np.dtype(dtype).kind
    return str(keras.config.floatx()) if kind == "f" else dtype if kind in "bO" else "int64"
