"""The user's `transformation_fn`: its signature, its call, and the checks of what it returns.

Training and predictions share these rules. Knows no framework, no engine and no processes. Any thread.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from spark_elastic.data.plan import Int64s
from spark_elastic.errors import InvalidInput
from spark_elastic.training.row_random import RowRandom

# A function of (columns), or of (columns, rng): rng is a `RowRandom` in training and None elsewhere.
Transformation = Callable[..., Mapping[str, Any]]


def check_transformation(function: Any) -> Any:
    """Check the parameter transformation_fn. Raises InvalidInput unless it is None or a function as above."""
    if function is None:
        return None
    if not callable(function):
        raise InvalidInput(f"transformation_fn must be a function; got {type(function).__name__}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # it does not say what it takes
    try:
        signature.bind({}, **({"rng": None} if "rng" in signature.parameters else {}))
    except TypeError:
        raise InvalidInput(
            f"transformation_fn takes {signature}: make it a function of (columns), or of (columns, rng) to draw "
            "random numbers for each row."
        ) from None
    return function


def takes_rng(function: Transformation) -> bool:
    """Whether it has a parameter `rng`."""
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def transform_columns(
    columns: Mapping[str, Any],
    rows: int,
    wanted: Sequence[str],
    transformation: Transformation,
    rng: RowRandom | None = None,
) -> dict[str, Any]:
    """The wanted columns of what the transformation makes of `rows` rows.

    Raises:
        InvalidInput: it returned no such column, or another number of rows.
    """
    given = {"rng": rng} if takes_rng(transformation) else {}
    results = transformation(dict(columns), **given)
    for name in wanted:
        if name not in results or len(results[name]) != rows:
            found = len(results[name]) if name in results else "no"
            raise InvalidInput(
                f"transformation_fn was given {rows} rows and returned {found} of column {name!r}: return an "
                "array of as many rows for each feature, label and weight column."
            )
    return {name: np.ascontiguousarray(results[name]) for name in wanted}


def transform_inputs(
    inputs: Sequence[Any], names: Sequence[str], transformation: Transformation | None
) -> list[Any]:
    """The model's inputs for a prediction. Raises InvalidInput as `transform_columns`.

    Args:
        names: of the feature columns, in the order of `inputs`.
    """
    if transformation is None:
        return list(inputs)
    given = dict(zip(names, inputs, strict=True))
    transformed = transform_columns(given, len(inputs[0]), names, transformation)
    return [transformed[name] for name in names]


def reshape_results(transformation: Transformation, shapes: Mapping[str, tuple[int, ...]]) -> Transformation:
    """A transformation that also reshapes the rows of the named columns, in training and for predictions."""
    return partial(_transform_and_reshape, transformation, shapes)


def _transform_and_reshape(
    transformation: Transformation,
    shapes: Mapping[str, tuple[int, ...]],
    columns: dict[str, Any],
    rng: RowRandom | None = None,
) -> Mapping[str, Any]:
    results = dict(transformation(columns, **({"rng": rng} if takes_rng(transformation) else {})))
    for name, shape in shapes.items():
        if name not in results:
            continue  # `transform_columns` raises the error
        array = np.asarray(results[name])
        if array.size != len(array) * math.prod(shape):
            raise InvalidInput(
                f"input_shapes says {shape} for column {name!r}, of which transformation_fn made an array of shape "
                f"{array.shape}: the numbers of a row do not fill it."
            )
        results[name] = array.reshape(len(array), *shape)
    return results


@dataclass(frozen=True)
class RowBatch:
    """A rank's rows of one step, as a transformation is to see them; crosses to another process."""

    columns: Mapping[str, Any]
    row_ids: Int64s
    epoch: int
    # Where to cut the rows into parts that are transformed one by one: 0, ..., their number. (): nowhere.
    cuts: tuple[int, ...]
    # Whether rows are augmented: in training alone.
    augments: bool


@dataclass(frozen=True)
class BatchTransformation:
    """A transformation with all that it needs of the fit; crosses to other processes."""

    function: Transformation
    # Columns that model and loss take.
    wanted: tuple[str, ...]
    seed: int

    def apply(self, batch: RowBatch) -> dict[str, Any]:
        """The wanted columns. Raises InvalidInput as `transform_columns`, and what the user's function raises."""
        if not batch.cuts:
            return self._apply_to_part(batch, batch.columns, batch.row_ids)
        parts = [
            # A copy: the alignment of the rows in memory must not depend on the worker's other rows.
            self._apply_to_part(
                batch,
                {name: c[low:high].copy() for name, c in batch.columns.items()},
                batch.row_ids[low:high],
            )
            for low, high in pairwise(batch.cuts)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in self.wanted}

    def _apply_to_part(self, batch: RowBatch, columns: Mapping[str, Any], row_ids: Int64s) -> dict[str, Any]:
        rng = RowRandom(self.seed, batch.epoch, row_ids) if batch.augments else None
        return transform_columns(columns, len(row_ids), self.wanted, self.function, rng)
