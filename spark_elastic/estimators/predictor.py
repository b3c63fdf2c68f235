"""A trained module as a function of columns: what each Python worker of Spark runs for `transform`.

Shipped in a broadcast, whose value Spark keeps per Python worker, so that the module is loaded once per worker and
not once per batch or task. Knows pandas and torch; of Spark only what its caller hands in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.saving import Packed
from spark_elastic.training.model_io import find_input_dtype, list_output_parts, refuse_large_numbers
from spark_elastic.training.transformation import Transformation, transform_inputs
from spark_elastic.worker.devices import find_gpu_number, list_visible_gpus

# Where a Python worker of Spark predicts: on the GPU that Spark assigned to its task, else on the CPU. Pure.


def choose_gpu(addresses: Sequence[str], visible: int) -> int | None:
    """The GPU's number, as the framework counts them; None: the CPU.

    addresses: of the GPUs that Spark gave to the task. visible: how many GPUs the framework sees.

    Raises:
        InvalidInput: the framework sees several GPUs, and none of them has that address.
    """
    if not addresses or not visible:
        return None
    names = list_visible_gpus(os.environ)
    return find_gpu_number(addresses[0], names if len(names) == visible else [str(n) for n in range(visible)])


# Rows as Spark hands them over, stacked to arrays and predicted in parts. Numpy only; any thread.


ROWS_AT_ONCE = 512  # bounds the memory of activations; Arrow's batches have 10,000 rows
Floats = npt.NDArray[np.float64]
Shape = tuple[int, ...]
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
        return [np.zeros((0, count_numbers(shape))) for shape in shapes()]
    return [np.concatenate(output) for output in zip(*parts, strict=True)]


def find_shapes(
    columns: Sequence[Column], sample: Sequence[Sequence[Any]] | None, forward: Forward
) -> list[Shape]:
    """Shape of a row of each output, tried on rows of zeros, or on `sample`, a row: on two and on three of them, since
    any other dimension of an output may be as long as one number of rows.

    Raises:
        InvalidInput: the first dimension of an output is not the rows.
    """
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


def count_numbers(shape: Sequence[int]) -> int:
    """How many numbers a row of this shape has."""
    return int(np.prod(shape, dtype=np.int64))


def stack_rows(rows: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    """Rows of numbers or (nested) lists as one array (rows, *shape). A null in a float column is NaN.

    Raises:
        InvalidInput: nulls, rows of another size or of uneven arrays, or values that the column's dtype cannot hold.
    """
    if column.dtype == "object":
        return _stack_objects(rows, column)
    if not column.shape:
        return _cast_to_trained_dtype(np.asarray(rows), column)
    size = count_numbers(column.shape)
    plain = [row for row in rows if isinstance(row, np.ndarray) and row.dtype != object and row.size == size]
    if len(plain) == len(rows) > 0:  # as Arrow hands arrays over
        return _cast_to_trained_dtype(np.concatenate(plain).reshape(len(plain), *column.shape), column)
    flat = [_cast_to_trained_dtype(_flatten_row(row, column, size), column) for row in rows]
    return np.array(flat, dtype=column.dtype).reshape(len(rows), *column.shape)


def _stack_objects(rows: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    """Stack bytes and strings, or (nested) lists of them."""
    leaves: list[Any] = list(rows)
    for length in column.shape:
        if any(each is None or len(each) != length for each in leaves):
            raise (
                _build_null_error(column)
                if any(each is None for each in leaves)
                else _build_uneven_error(column)
            )
        leaves = [part for each in leaves for part in each]
    if any(each is None for each in leaves):
        raise _build_null_error(column)
    objects = np.empty(len(leaves), dtype=object)
    objects[:] = [bytes(each) if isinstance(each, bytearray) else each for each in leaves]
    return objects.reshape(len(rows), *column.shape)


def _flatten_row(row: Any, column: Column, size: int) -> npt.NDArray[Any]:
    if row is None:
        raise _build_null_error(column)
    array = _to_regular_array(row, column)
    if array.size != size:
        raise InvalidInput(
            f"column {column.name!r} has a row of {array.size} numbers; the model was trained on {size}."
        )
    return array.reshape(-1)


def _to_regular_array(row: Any, column: Column) -> npt.NDArray[Any]:
    """Convert a row to one array. Raises InvalidInput if its arrays have different lengths in a dimension."""
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
        if any(value is None or value != value for value in values.flat):
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


@dataclass(frozen=True)
class TorchPredictor:
    """Rows in, predictions out; the module runs in evaluation mode without gradients."""

    # A module, or a `ModuleWithTransformation`.
    packed: Packed
    # Of the features.
    columns: tuple[Column, ...]

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
        """Whether the outputs' shapes can only be found with a real row: a transformation may fail on zeros."""
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
        """A new copy of the module, in evaluation mode."""
        return self._unpack()[0]

    def parts(self) -> dict[str, bytes]:
        """What is saved, by name."""
        return self.packed.parts()

    def __getstate__(self) -> dict[str, Any]:
        return {"packed": self.packed, "columns": self.columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def shapes(self, sample: Sequence[Sequence[Any]] | None = None) -> list[Shape]:
        return find_shapes(self.columns, sample, self._forward)

    def predict(
        self, columns: Sequence[Sequence[Any]], gpus: Sequence[str] = ()
    ) -> list[npt.NDArray[np.float64]]:
        """columns: for each input column its rows. Returns (rows, width) for each output of the model."""
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

    def _forward(
        self, inputs: Sequence[npt.NDArray[Any]], device: str = "cpu"
    ) -> list[npt.NDArray[np.float64]]:
        self._loaded[0].to(device)  # where it is there already, nothing happens
        given = transform_inputs(inputs, [column.name for column in self.columns], self._loaded[1])
        outputs = self.call_module([self.make_tensor(values).to(device) for values in given])
        for each in outputs:
            if not isinstance(each, torch.Tensor):
                raise InvalidInput(
                    "transform needs a model that returns tensors, or a tuple, list or dict of them; this one returns "
                    f"{type(each).__name__}."
                )
        return [each.to(torch.float64).cpu().numpy() for each in outputs]


# The interface between a fitted model and the trained model of any framework.


class Predictor(Protocol):
    """A trained model as a function of columns; pickles, for a broadcast."""

    @property
    def columns(self) -> tuple[Column, ...]: ...

    def model(self) -> Any:
        """A new copy of the framework's model."""
        ...

    def parts(self) -> dict[str, bytes]:
        """What is saved, by name."""
        ...

    @property
    def needs_sample(self) -> bool:
        """Whether `shapes` must be given a row to try."""
        ...

    def call_model(self, columns: Sequence[npt.NDArray[Any]]) -> tuple[Any, Any]:
        """(what the model takes of the feature columns, what it returns): arrays, or dicts of several by name."""
        ...

    def shapes(self, sample: Sequence[Sequence[Any]] | None = None) -> list[Shape]:
        """Shape of a row of each output. sample: for each input column a list of one row."""
        ...

    def predict(
        self, columns: Sequence[Sequence[Any]], gpus: Sequence[str] = ()
    ) -> list[npt.NDArray[np.float64]]:
        """(rows, width) for each output. columns: for each input column its rows. gpus: addresses of those that Spark
        gave to the task."""
        ...


ACTIVATIONS = ("softmax", "sigmoid", "exp", "identity")


@dataclass(frozen=True)
class Outputs:
    """The columns that predictions fill."""

    # Names.
    columns: tuple[str, ...]
    # How many numbers a row has in each column; 1: a plain double.
    widths: tuple[int, ...]
    # What makes class probabilities of the one output: then the columns are the class, as a double, the probabilities
    # and, if there is a third one, what they are made of. None: the outputs are returned as they are.
    activation: str | None = None

    @classmethod
    def of(
        cls,
        shapes: Sequence[Shape],
        prediction_col: str,
        probability_col: str | None = None,
        raw_prediction_col: str | None = None,
        activation: str | None = None,
        output_cols: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> Outputs:
        """shapes: of a row of each output of the model. Raises InvalidInput where the columns do not fit it."""
        widths = tuple(map(count_numbers, shapes))
        if probability_col is None:
            if output_cols is None:
                output_cols = (
                    [prediction_col] if len(widths) == 1 else [f"{label}__output" for label in labels]
                )
            if len(output_cols) != len(widths):
                raise InvalidInput(
                    f"the model has {len(widths)} outputs: name as many columns in output_cols, not {len(output_cols)}."
                )
            return cls(tuple(output_cols), widths)
        if len(widths) != 1 or output_cols is not None:
            raise InvalidInput(
                "probability_col needs a model of one output and no output_cols: leave one out."
            )
        if sum(size > 1 for size in shapes[0]) > 1:
            raise InvalidInput(
                f"probability_col needs an output of one number for each class; this model returns {shapes[0]} a row: "
                "leave probability_col out, and take the classes from the prediction."
            )
        if activation not in ACTIVATIONS:
            raise InvalidInput(
                f"probability_col needs activation, one of {', '.join(ACTIVATIONS)}: the loss does not say what makes "
                "probabilities of the model's output."
            )
        if (activation == "softmax" and widths[0] == 1) or (activation == "sigmoid" and widths[0] > 1):
            raise InvalidInput(
                f"activation {activation} makes no class probabilities of {widths[0]} numbers a row: sigmoid takes "
                "one, softmax several."
            )
        vectors = [name for name in (probability_col, raw_prediction_col) if name is not None]
        width = max(2, widths[0])
        return cls((prediction_col, *vectors), (1, *(width for _ in vectors)), activation)

    @staticmethod
    def find_known_columns(
        prediction_col: str,
        probability_col: str | None = None,
        raw_prediction_col: str | None = None,
        output_cols: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """The columns that there will be, where their number does not depend on the model's outputs; else none."""
        if probability_col is not None:
            return tuple(n for n in (prediction_col, probability_col, raw_prediction_col) if n is not None)
        if output_cols is not None:
            return tuple(output_cols)
        return (prediction_col,) if len(labels) <= 1 else ()

    def values(self, outputs: Sequence[Floats]) -> list[Floats]:
        """outputs: (rows, width) each. Returns, for each column, (rows, its width)."""
        if self.activation is None:
            return list(outputs)
        probabilities = _probabilities(outputs[0], self.activation)
        classes = np.where(np.isnan(probabilities).any(1), np.nan, probabilities.argmax(1))
        found = [classes[:, None], probabilities]
        return (
            found
            if len(self.columns) == 2
            else [*found, _compute_raw_predictions(outputs[0], probabilities, self.activation)]
        )


def _probabilities(output: Floats, activation: str) -> Floats:
    if activation == "softmax":
        exponents = np.exp(output - output.max(1, keepdims=True))
        found: Floats = exponents / exponents.sum(1, keepdims=True)
        return found
    if activation == "sigmoid":
        found = 0.5 * (1.0 + np.tanh(0.5 * output))  # no overflow
    else:
        found = np.exp(output) if activation == "exp" else output
    return np.concatenate([1.0 - found, found], axis=1) if found.shape[1] == 1 else found


def _compute_raw_predictions(output: Floats, probabilities: Floats, activation: str) -> Floats:
    """What Spark ML's classifiers call rawPrediction: the output itself, or a number for each of two classes."""
    if output.shape[1] > 1:
        return output
    return np.concatenate([-output, output], axis=1) if activation == "sigmoid" else probabilities


def as_column(values: Floats) -> Any:
    """(rows, 1) as plain numbers, anything wider as a list of arrays."""
    return values[:, 0] if values.shape[1] == 1 else list(values)
