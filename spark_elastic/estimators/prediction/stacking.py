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
    """Rows of numbers or (nested) lists as one array (rows, *shape). A null in a float column is NaN.

    Raises:
        InvalidInput: nulls, rows of another size or of uneven arrays, or values that the column's dtype cannot hold.
    """
    if column.dtype == "object":
        return _objects(rows, column)
    if not column.shape:
        return _as_trained(np.asarray(rows), column)
    size = int(np.prod(column.shape, dtype=np.int64))
    plain = [row for row in rows if isinstance(row, np.ndarray) and row.dtype != object and row.size == size]
    if len(plain) == len(rows) > 0:  # as Arrow hands arrays over
        return _as_trained(np.concatenate(plain).reshape(len(plain), *column.shape), column)
    flat = [_as_trained(_row(row, column, size), column) for row in rows]
    return np.array(flat, dtype=column.dtype).reshape(len(rows), *column.shape)


def _objects(rows: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    """Bytes and strings, or (nested) lists of them."""
    leaves: list[Any] = list(rows)
    for length in column.shape:
        if any(each is None or len(each) != length for each in leaves):
            raise _nulls(column) if any(each is None for each in leaves) else _uneven(column)
        leaves = [part for each in leaves for part in each]
    if any(each is None for each in leaves):
        raise _nulls(column)
    objects = np.empty(len(leaves), dtype=object)
    objects[:] = [bytes(each) if isinstance(each, bytearray) else each for each in leaves]
    return objects.reshape(len(rows), *column.shape)


def _row(row: Any, column: Column, size: int) -> npt.NDArray[Any]:
    if row is None:
        raise _nulls(column)
    array = _regular(row, column)
    if array.size != size:
        raise InvalidInput(
            f"column {column.name!r} has a row of {array.size} numbers; the model was trained on {size}."
        )
    return array.reshape(-1)


def _regular(row: Any, column: Column) -> npt.NDArray[Any]:
    """A row whose arrays are of one length in each dimension."""
    if not isinstance(row, np.ndarray | list | tuple):
        return np.asarray(row)
    if isinstance(row, np.ndarray) and row.dtype != object:
        return row
    parts = [_regular(part, column) for part in row]
    if len({part.shape for part in parts}) > 1:
        raise _uneven(column)
    return np.array(parts)


def _as_trained(values: npt.NDArray[Any], column: Column) -> npt.NDArray[Any]:
    """In the dtype of the training, each value the same."""
    wanted = np.dtype(column.dtype)
    if values.dtype == object:
        if any(value is None or value != value for value in values.flat):
            raise _nulls(column)
        values = values.astype(wanted if wanted.kind == "M" else np.float64)
    if wanted.kind in "iubM":
        if values.dtype.kind == "f":  # as pandas hands whole numbers with nulls over
            if np.isnan(values).any():
                raise _nulls(column)
            _refuse(values != np.trunc(values), values, column)
        if wanted.kind in "iu" and values.dtype.kind in "iuf" and not np.can_cast(values.dtype, wanted):
            limits = np.iinfo(wanted)
            _refuse((values < limits.min) | (values > limits.max), values, column)
        if wanted.kind == "b" and values.dtype.kind != "b":
            _refuse((values != 0) & (values != 1), values, column)
    cast = values.astype(wanted, copy=False)
    if wanted.kind == "M" and np.isnat(cast).any():
        raise _nulls(column)
    return cast


def _refuse(which: npt.NDArray[Any], values: npt.NDArray[Any], column: Column) -> None:
    if which.any():
        raise InvalidInput(
            f"column {column.name!r} has {values[which][0]}; the model was trained on {column.dtype}, which cannot "
            "hold it."
        )


def _uneven(column: Column) -> InvalidInput:
    return InvalidInput(
        f"column {column.name!r} has a row whose arrays are not of the lengths that the model was trained on "
        f"{column.shape}: pad or cut them."
    )


def _nulls(column: Column) -> InvalidInput:
    return InvalidInput(f"column {column.name!r} has nulls: fill or drop them before transform.")
