"""Rows as Spark hands them over, stacked to arrays and predicted in parts. Numpy only; any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput

ROWS_AT_ONCE = 512  # bounds the memory of activations; Arrow's batches have 10,000 rows
Floats = npt.NDArray[np.float64]


def in_parts(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]],
    forward: Callable[[Sequence[npt.NDArray[Any]]], list[Floats]],
    widths: Callable[[], list[int]],
) -> list[Floats]:
    """`forward` over all rows, a bounded number at a time: (rows, width) for each output. rows: for each column."""
    inputs = [stacked(values, column) for values, column in zip(rows, columns, strict=True)]
    count = len(inputs[0])
    parts = [
        forward([values[start : start + ROWS_AT_ONCE] for values in inputs])
        for start in range(0, count, ROWS_AT_ONCE)
    ]
    if not parts:
        return [np.zeros((0, width)) for width in widths()]
    return [np.concatenate(output) for output in zip(*parts, strict=True)]


def stacked(rows: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    """Rows of numbers or (nested) lists as one array (rows, *shape). A null in a float column is NaN."""
    if column.dtype == "object":
        if any(row is None for row in rows):
            raise _nulls(column)
        objects = np.empty(len(rows), dtype=object)
        objects[:] = list(rows)
        return objects
    if not column.shape:
        values = np.asarray(rows)
        whole = np.dtype(column.dtype).kind in "iubM"
        # pandas hands an integer column with nulls over as floats with NaN.
        if values.dtype == object or (whole and values.dtype.kind == "f" and np.isnan(values).any()):
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
