"""A trained module as a function of columns: what each Python worker of Spark runs for `transform`.

Knows pandas and torch; of Spark only what its caller hands in.
"""

from __future__ import annotations

import dataclasses
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.manifest import Column
from spark_elastic.data.transformation import (
    Transformation,
    check_numbers,
    find_input_dtype,
    list_output_parts,
    refuse_large_numbers,
    transform_inputs,
)
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.outputs import Floats, Shape
from spark_elastic.estimators.saving import Packed
from spark_elastic.worker.devices import find_gpu_number, list_visible_gpus

# Where a Python worker of Spark predicts: on the GPU that Spark assigned to its task, else on the CPU. Pure.


def choose_gpu(addresses: Sequence[str], visible: int) -> int | None:
    """The number of the GPU that Spark gave to the task, as the framework counts; None: the CPU."""
    if not addresses or not visible:
        return None
    names = list_visible_gpus(os.environ)
    return find_gpu_number(addresses[0], names if len(names) == visible else [str(n) for n in range(visible)])


# Rows as Spark hands them over, stacked to arrays and predicted in parts. Numpy only; any thread.


ROWS_AT_ONCE = 512  # bounds the memory of activations; Arrow's batches have 10,000 rows
Forward = Callable[[Sequence[npt.NDArray[Any]]], list[Floats]]  # from inputs to outputs, of a few rows


def predict_in_batches(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]],
    forward: Forward,
    shapes: Callable[[], list[Shape]],
) -> list[Floats]:
    """`forward` over all rows, a bounded number at a time: (rows, width) for each output. rows: for each column."""
    inputs = [stack_rows(values, column) for values, column in zip(rows, columns, strict=True)]
    parts = []
    for start in range(0, len(inputs[0]), ROWS_AT_ONCE):
        part = [values[start : start + ROWS_AT_ONCE] for values in inputs]
        count = len(part[0])
        parts.append([_check_rows(output, count).reshape(count, -1) for output in forward(part)])
    if not parts:
        return [np.zeros((0, math.prod(shape))) for shape in shapes()]
    return [np.concatenate(output) for output in zip(*parts, strict=True)]


def find_shapes(
    columns: Sequence[Column], sample: Sequence[Sequence[Any]] | None, forward: Forward
) -> list[Shape]:
    """Shape of a row of each output, tried on zeros, or on `sample`, a row: on two and on three of them, since any
    other dimension may be as long as one number of rows. InvalidInput: the first dimension is not the rows."""
    outputs: list[Floats] = []
    for rows in (2, 3):
        if sample is None:
            inputs = [np.zeros((rows, *column.shape), column.dtype) for column in columns]
        else:
            inputs = [stack_rows([*row] * rows, column) for row, column in zip(sample, columns, strict=True)]
        outputs = [_check_rows(output, rows) for output in forward(inputs)]
    return [output.shape[1:] for output in outputs]


def _check_rows(output: Floats, rows: int) -> Floats:
    """A single row may come without its dimension, as `squeeze()` leaves it. Raises InvalidInput, as `find_shapes`."""
    if rows > 1 and output.shape[:1] != (rows,):
        raise InvalidInput(
            "transform needs outputs whose first dimension is the rows; this model returns "
            f"{output.shape} for {rows} rows: leave that output out, or turn it."
        )
    return output


def stack_rows(rows: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    """Rows of numbers or (nested) lists as one array (rows, *shape); in floats null is NaN. Raises InvalidInput for
    other nulls, rows of another size, and values that the column's dtype cannot hold."""
    if column.ragged:
        return _stack_ragged(rows, column)
    if column.dtype == "object":
        return _stack_objects(rows, column)
    if not column.shape:
        return _cast_to_trained_dtype(np.asarray(rows), column)
    size = math.prod(column.shape)
    plain = [row for row in rows if isinstance(row, np.ndarray) and row.dtype != object and row.size == size]
    if len(plain) == len(rows) > 0:  # as Arrow hands arrays over
        return _cast_to_trained_dtype(np.concatenate(plain).reshape(len(plain), *column.shape), column)
    flat = [_cast_to_trained_dtype(_flatten_row(row, column, size), column) for row in rows]
    return np.array(flat, dtype=column.dtype).reshape(len(rows), *column.shape)


def _stack_ragged(rows: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    """Rows of different lengths as an object array of arrays, as in training."""
    if any(map(_is_missing, rows)):
        raise _build_null_error(column)
    element, found = Column(column.name, column.ragged), np.empty(len(rows), object)
    for number, row in enumerate(rows):
        found[number] = stack_rows(row, element)
    return found


def _stack_objects(rows: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    leaves: list[Any] = list(rows)
    for length in column.shape:
        if any(map(_is_missing, leaves)):
            raise _build_null_error(column)
        if any(len(each) != length for each in leaves):
            raise _build_uneven_error(column)
        leaves = [part for each in leaves for part in each]
    if any(map(_is_missing, leaves)):
        raise _build_null_error(column)
    objects = np.empty(len(leaves), dtype=object)
    objects[:] = [bytes(each) if isinstance(each, bytearray) else each for each in leaves]
    return objects.reshape(len(rows), *column.shape)


def _is_missing(value: Any) -> bool:
    """Whether it stands for null in pandas or pyarrow: None, NaN, NaT, pandas.NA, a scalar of pyarrow that is null."""
    if hasattr(value, "__len__"):
        return False
    try:
        return value is None or not getattr(value, "is_valid", True) or bool(value != value)
    except TypeError:  # pandas.NA has no truth value
        return True


def _flatten_row(row: Any, column: Column, size: int) -> npt.NDArray[Any]:
    if _is_missing(row):
        raise _build_null_error(column)
    array = _to_regular_array(row, column)
    if array.size != size:
        raise InvalidInput(
            f"column {column.name!r} has a row of {array.size} numbers; the model was trained on {size}."
        )
    return array.reshape(-1)


def _to_regular_array(row: Any, column: Column) -> npt.NDArray[Any]:
    if not isinstance(row, np.ndarray | list | tuple):
        return np.asarray(row)
    if isinstance(row, np.ndarray) and row.dtype != object:
        return row
    parts = [_to_regular_array(part, column) for part in row]
    if len({part.shape for part in parts}) > 1:
        raise _build_uneven_error(column)
    return np.array(parts)


def _cast_to_trained_dtype(values: npt.NDArray[Any], column: Column) -> npt.NDArray[Any]:
    """Cast values to the dtype of the training. Raises InvalidInput for a value that would change."""
    wanted = np.dtype(column.dtype)
    if values.dtype == object:
        if any(map(_is_missing, values.flat)):
            raise _build_null_error(column)
        values = values.astype(wanted if wanted.kind == "M" else np.float64)
    if wanted.kind in "iubM":
        if values.dtype.kind == "f":  # as pandas hands whole numbers with nulls over
            if np.isnan(values).any():
                raise _build_null_error(column)
            _refuse_values(values != np.trunc(values), values, column)
        if wanted.kind in "iu" and values.dtype.kind in "iuf" and not np.can_cast(values.dtype, wanted):
            limits = np.iinfo(wanted)
            _refuse_values((values < limits.min) | (values > limits.max), values, column)
        if wanted.kind == "b" and values.dtype.kind != "b":
            _refuse_values((values != 0) & (values != 1), values, column)
    cast = values.astype(wanted, copy=False)
    if wanted.kind == "M" and np.isnat(cast).any():
        raise _build_null_error(column)
    return cast


def _refuse_values(which: npt.NDArray[Any], values: npt.NDArray[Any], column: Column) -> None:
    if which.any():
        raise InvalidInput(
            f"column {column.name!r} has {values[which][0]}; the model was trained on {column.dtype}, which cannot "
            "hold it."
        )


def _build_uneven_error(column: Column) -> InvalidInput:
    return InvalidInput(
        f"column {column.name!r} has a row whose arrays are not of the lengths that the model was trained on "
        f"{column.shape}: pad or cut them."
    )


def _build_null_error(column: Column) -> InvalidInput:
    return InvalidInput(f"column {column.name!r} has nulls: fill or drop them before transform.")


def name_parts(parts: Sequence[Any], names: Sequence[str] = ()) -> Any:
    """The only part, or several by name. names: (): numbers."""
    found = names or [f"output_{number}" for number in range(len(parts))]
    return parts[0] if len(parts) == 1 else dict(zip(found, parts, strict=True))


@dataclass(frozen=True)
class ModuleWithTransformation:
    """A module whose inputs a function makes of the feature columns; packed in the module's place."""

    module: torch.nn.Module  # takes the columns that `transformation` returns
    transformation: Transformation  # the user's `transformation_fn`


class Predictor(ABC):
    """A trained model of any framework as a function of columns; pickles without what it has loaded."""

    columns: tuple[Column, ...]

    def __getstate__(self) -> dict[str, Any]:
        known: Any = self  # a dataclass
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(known)}

    @property
    @abstractmethod
    def needs_sample(self) -> bool:
        """Whether `shapes` must be given a row to try: a transformation may fail on zeros."""

    @abstractmethod
    def model(self) -> Any: ...

    @abstractmethod
    def parts(self) -> dict[str, bytes]: ...

    @abstractmethod
    def call_model(self, columns: Sequence[npt.NDArray[Any]]) -> tuple[Any, Any]:
        """(what the model takes of the feature columns, what it returns): arrays, or dicts of several by name."""

    @abstractmethod
    def shapes(self, sample: Sequence[Sequence[Any]] | None = None) -> list[Shape]:
        """Shape of a row of each output. sample: for each input column a list of one row."""

    @abstractmethod
    def predict(self, columns: Sequence[Sequence[Any]], gpus: Sequence[str] = ()) -> list[Floats]:
        """(rows, width) for each output. columns: the rows of each input column. gpus: addresses, by Spark."""


@dataclass(frozen=True)
class TorchPredictor(Predictor):
    """Rows in, predictions out; the module runs in evaluation mode without gradients."""

    packed: Packed  # a module, or a `ModuleWithTransformation`
    columns: tuple[Column, ...]  # of the features

    def _unpack(self) -> tuple[torch.nn.Module, Transformation | None]:
        thing = self.packed.unpack()
        if isinstance(thing, ModuleWithTransformation):
            return thing.module.eval(), thing.transformation
        return thing.eval(), None

    @cached_property
    def _loaded(self) -> tuple[torch.nn.Module, Transformation | None]:
        return self._unpack()

    @property
    def needs_sample(self) -> bool:
        return self._loaded[1] is not None

    @cached_property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = find_input_dtype(self._loaded[0].parameters(), torch.get_default_dtype())
        return found

    def make_tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """As in training: floating point numbers in the model's dtype, whole ones as int64."""
        tensor = torch.from_numpy(refuse_large_numbers(np.array(values)))
        if tensor.is_floating_point():
            return tensor.to(self._dtype)
        return tensor if tensor.dtype is torch.bool else tensor.to(torch.int64)

    def model(self) -> torch.nn.Module:
        return self._unpack()[0]

    def parts(self) -> dict[str, bytes]:
        return self.packed.parts()

    def shapes(self, sample: Sequence[Sequence[Any]] | None = None) -> list[Shape]:
        return find_shapes(self.columns, sample, self._forward)

    def predict(self, columns: Sequence[Sequence[Any]], gpus: Sequence[str] = ()) -> list[Floats]:
        number = choose_gpu(gpus, torch.cuda.device_count())
        forward = partial(self._forward, device="cpu" if number is None else f"cuda:{number}")
        return predict_in_batches(self.columns, columns, forward, self.shapes)

    def call_model(self, columns: Sequence[npt.NDArray[Any]]) -> tuple[Any, Any]:
        tensors = [self.make_tensor(column) for column in columns]
        outputs = [output.numpy() for output in self.call_module(tensors)]
        inputs = [tensor.numpy() for tensor in tensors]
        return name_parts(inputs, [column.name for column in self.columns]), name_parts(outputs)

    def call_module(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The module's outputs for its inputs, which lie where the module does."""
        with torch.inference_mode():
            output = self._loaded[0](*tensors)
        outputs = list_output_parts(output)
        # What transformers' models keep for themselves (a cache) is no prediction.
        if isinstance(output, Mapping):
            outputs = tuple(each for each in outputs if isinstance(each, torch.Tensor)) or outputs
        return outputs

    def _forward(self, inputs: Sequence[npt.NDArray[Any]], device: str = "cpu") -> list[Floats]:
        self._loaded[0].to(device)  # where it is there already, nothing happens
        given = transform_inputs(inputs, [column.name for column in self.columns], self._loaded[1])
        for column, values in zip(self.columns, given, strict=True):
            check_numbers(column.name, values)
        outputs = self.call_module([self.make_tensor(values).to(device) for values in given])
        for each in outputs:
            if not isinstance(each, torch.Tensor):
                raise InvalidInput(
                    "transform needs a model that returns tensors, or a tuple, list or dict of them; this one returns "
                    f"{type(each).__name__}."
                )
        return [each.to(torch.float64).cpu().numpy() for each in outputs]
