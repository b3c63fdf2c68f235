"""The user's function of the columns of a part, applied and checked. Training thread; knows no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput

Transformation = Callable[[dict[str, Any]], Mapping[str, Any]]


def transformed(
    rows: StepRows, wanted: Sequence[str], transformation: Transformation | None
) -> Mapping[str, Any]:
    """The wanted columns, by name. Raises InvalidInput where the function leaves one out, or rows of it."""
    if transformation is None:
        return rows.columns
    return checked_columns(transformation(dict(rows.columns)), wanted, len(rows))


def changed(
    inputs: Sequence[Any], columns: Sequence[Column], transformation: Transformation | None
) -> list[Any]:
    """Feature columns as the model takes them, each in its place; raises as `transformed` does."""
    if transformation is None:
        return list(inputs)
    names = [column.name for column in columns]
    made = checked_columns(transformation(dict(zip(names, inputs, strict=True))), names, len(inputs[0]))
    return [made[name] for name in names]


def reshaping(transformation: Transformation, shapes: Mapping[str, tuple[int, ...]]) -> Transformation:
    """`transformation`, then each named column's rows in the given shape, in training and for predictions alike."""
    return partial(_reshaped, transformation, shapes)


def _reshaped(
    transformation: Transformation, shapes: Mapping[str, tuple[int, ...]], columns: dict[str, Any]
) -> Mapping[str, Any]:
    made = dict(transformation(columns))
    for name, shape in shapes.items():
        if name not in made:
            continue  # `checked_columns` says so
        array = np.asarray(made[name])
        if array.size != len(array) * math.prod(shape):
            raise InvalidInput(
                f"input_shapes says {shape} for column {name!r}, of which transformation_fn made an array of shape "
                f"{array.shape}: the numbers of a row do not fill it."
            )
        made[name] = array.reshape(len(array), *shape)
    return made


def checked_columns(columns: Mapping[str, Any], wanted: Sequence[str], rows: int) -> Mapping[str, Any]:
    """What a transformation made of `rows` rows: the wanted columns. Raises as `transformed` does."""
    for name in wanted:
        if name not in columns or len(columns[name]) != rows:
            found = len(columns[name]) if name in columns else "no"
            raise InvalidInput(
                f"transformation_fn was given {rows} rows and returned {found} of column {name!r}: return an "
                "array of as many rows for each feature, label and weight column."
            )
    return {name: np.ascontiguousarray(columns[name]) for name in wanted}
