"""What goes into a model and comes out of it: the user's transformation of columns, the inputs' dtype, the outputs.

Training and predictions share these rules. Knows no framework and no engine: a process that only predicts needs
neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput

Transformation = Callable[[dict[str, Any]], Mapping[str, Any]]


def transform_columns(
    rows: StepRows, wanted: Sequence[str], transformation: Transformation | None
) -> Mapping[str, Any]:
    """The wanted columns by name.

    Raises:
        InvalidInput: the transformation returned no such column, or another number of rows.
    """
    if transformation is None:
        return rows.columns
    return check_columns(transformation(dict(rows.columns)), wanted, len(rows))


def transform_inputs(
    inputs: Sequence[Any], columns: Sequence[Column], transformation: Transformation | None
) -> list[Any]:
    """The model's inputs in the order of the feature columns. Raises InvalidInput as `transform_columns`."""
    if transformation is None:
        return list(inputs)
    names = [column.name for column in columns]
    transformed = check_columns(transformation(dict(zip(names, inputs, strict=True))), names, len(inputs[0]))
    return [transformed[name] for name in names]


def reshape_results(transformation: Transformation, shapes: Mapping[str, tuple[int, ...]]) -> Transformation:
    """A transformation that also reshapes the rows of the named columns, in training and for predictions."""
    return partial(_transform_and_reshape, transformation, shapes)


def _transform_and_reshape(
    transformation: Transformation, shapes: Mapping[str, tuple[int, ...]], columns: dict[str, Any]
) -> Mapping[str, Any]:
    results = dict(transformation(columns))
    for name, shape in shapes.items():
        if name not in results:
            continue  # `check_columns` raises the error
        array = np.asarray(results[name])
        if array.size != len(array) * math.prod(shape):
            raise InvalidInput(
                f"input_shapes says {shape} for column {name!r}, of which transformation_fn made an array of shape "
                f"{array.shape}: the numbers of a row do not fill it."
            )
        results[name] = array.reshape(len(array), *shape)
    return results


def check_columns(columns: Mapping[str, Any], wanted: Sequence[str], rows: int) -> Mapping[str, Any]:
    """The wanted columns of a transformation's result for `rows` rows. Raises InvalidInput as `transform_columns`."""
    for name in wanted:
        if name not in columns or len(columns[name]) != rows:
            found = len(columns[name]) if name in columns else "no"
            raise InvalidInput(
                f"transformation_fn was given {rows} rows and returned {found} of column {name!r}: return an "
                "array of as many rows for each feature, label and weight column."
            )
    return {name: np.ascontiguousarray(columns[name]) for name in wanted}


def input_dtype(parameters: Iterable[Any], default: Any) -> Any:
    """The dtype in which a model is given its columns: that of the first parameter that is trained, since a frozen one
    may have fewer bits.

    Args:
        default: for models without floating point parameters.
    """
    floats = [parameter for parameter in parameters if parameter.is_floating_point()]
    trained = [parameter for parameter in floats if parameter.requires_grad]
    return next((parameter.dtype for parameter in trained or floats), default)


def output_parts(output: Any) -> tuple[Any, ...]:
    """A model's outputs in order: each member of a tuple, list or dict (as transformers' models return)."""
    if isinstance(output, Mapping):
        return tuple(output.values())
    return tuple(output) if isinstance(output, tuple | list) else (output,)
