"""What goes into a model and comes out of it; above all the user's `transformation_fn` and its random numbers.

Training and predictions share these rules. Knows no framework, no engine and no processes. Any thread.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.checks import WHOLE, make_choice, param
from spark_elastic.data.packing import Ragged
from spark_elastic.data.plan import Int64s, draw_uniform
from spark_elastic.errors import InvalidInput

Transformation = Callable[..., Mapping[str, Any]]  # of (columns), or of (columns, rng)


@dataclass(frozen=True, kw_only=True)
class TransformationConfig:
    # Processes or threads of a worker that apply it; 0: the training thread does.
    transformation_workers: int = param(WHOLE, 0, may_change=True)
    transformation_pool: str = param(make_choice("process", "thread"), "process", may_change=True)


def takes_rng(function: Transformation) -> bool:
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def transform_columns(
    columns: Mapping[str, Any],
    rows: int,
    wanted: Sequence[str] | None,
    transformation: Transformation,
    rng: RowRandom | None = None,
) -> dict[str, Any]:
    """The wanted columns (None: all) of the result. Raises InvalidInput: it lacks one, or has other rows."""
    given = {"rng": rng} if takes_rng(transformation) else {}
    results = transformation(dict(columns), **given)
    _check_results(results)
    keeps_ragged = wanted is None  # of a loop
    for name in results if wanted is None else wanted:
        if name not in results or len(results[name]) != rows:
            found = len(results[name]) if name in results else "no"
            raise InvalidInput(
                f"transformation_fn was given {rows} rows and returned {found} of column {name!r}: return an "
                "array of as many rows for each feature, label and weight column."
            )
    kept = {name: results[name] for name in (results if wanted is None else wanted)}
    return {n: v if keeps_ragged and isinstance(v, Ragged) else _stack_rows(n, v) for n, v in kept.items()}


def _stack_rows(name: str, values: Any) -> npt.NDArray[Any]:
    with suppress(ValueError):
        if not isinstance(values, Ragged):
            return np.ascontiguousarray(values)
    raise InvalidInput(
        f"transformation_fn returned rows of different shapes as column {name!r}: bring them to one shape, lists of "
        "numbers by Ragged.of(rows).pad(0)."
    )


def _check_results(results: Any) -> None:
    """A table of another library may be no Mapping."""
    if not hasattr(results, "__contains__") or isinstance(results, str | list | tuple | np.ndarray):
        raise InvalidInput(
            f"transformation_fn returned {'None' if results is None else type(results).__name__}: return a dict with "
            "an array for each feature, label and weight column."
        )


def transform_inputs(
    inputs: Sequence[Any], names: Sequence[str], transformation: Transformation | None
) -> list[Any]:
    """The model's inputs for a prediction, in the order of `names`. Raises InvalidInput as `transform_columns`."""
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
    returned = transformation(columns, **({"rng": rng} if takes_rng(transformation) else {}))
    _check_results(returned)
    results = dict(returned)
    for name, shape in shapes.items():
        if name not in results:
            continue  # `transform_columns` raises the error
        array = _stack_rows(name, results[name])
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

    columns: Mapping[str, Any]  # column -> an array of the rows' values, before the transformation
    row_ids: Int64s  # (n,) the global number of each row, which its random numbers go by
    epoch: int  # from 0
    cuts: tuple[int, ...]  # of parts that are transformed one by one: 0, ..., rows. (): nowhere
    augments: bool  # whether rows are augmented: in training alone


@dataclass(frozen=True)
class BatchTransformation:
    """A transformation with all that it needs of the fit; crosses to other processes."""

    function: Transformation  # the user's
    wanted: tuple[str, ...]  # columns that model and loss take
    seed: int  # of the fit, for augmentation
    # Whether a rank without rows needs their shape in training: its forward pass exchanges statistics of no rows.
    shapes_nothing: bool = False

    def apply(self, batch: RowBatch) -> dict[str, Any]:
        """The wanted columns. The user's function, which may stack rows, gets none only where their shape is needed;
        else columns of no rows are empty arrays. Raises InvalidInput, and what the function raises."""
        if not len(batch.row_ids) and not (self.shapes_nothing and batch.augments):
            return {name: np.zeros(0, np.float32) for name in self.wanted}
        if not batch.cuts:
            return self._apply_to_part(batch, batch.columns, batch.row_ids)
        parts = []
        for low, high in pairwise(batch.cuts):
            if low < high:
                # A copy: the alignment of the rows in memory must not depend on the worker's other rows.
                columns = {name: _copy_rows(c[low:high]) for name, c in batch.columns.items()}
                parts.append(self._apply_to_part(batch, columns, batch.row_ids[low:high]))
        return {name: np.concatenate([part[name] for part in parts]) for name in self.wanted}

    def _apply_to_part(self, batch: RowBatch, columns: Mapping[str, Any], row_ids: Int64s) -> dict[str, Any]:
        rng = RowRandom(self.seed, batch.epoch, row_ids) if batch.augments else None
        return transform_columns(columns, len(row_ids), self.wanted, self.function, rng)


def _copy_rows(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    copied = rows.copy()
    for place, row in enumerate(copied) if rows.dtype == object else ():
        copied[place] = np.copy(row) if isinstance(row, np.ndarray) else row  # ragged rows are views
    return copied


# ---- random numbers of single rows

_AUGMENTATION = 0x6175676D  # keeps these numbers apart from those of RowDropout and of the order of the rows


Size = int | tuple[int, ...]


class RowRandom:
    """What a `transformation_fn` receives as `rng` in training: methods of numpy's Generator over the rows at hand.

    What a row draws depends on the fit's seed, the epoch and the row's number alone, whichever worker takes it beside
    whatever others, so augmented training keeps P2 (the world's size does not change the mathematics). One thread uses
    an object.

    Each result has shape (rows, *size). The n-th call draws the same for a row wherever it is made, so make the same
    calls for all rows, not only where some condition holds.
    """

    def __init__(self, seed: int, epoch: int, row_ids: Int64s) -> None:
        self._words = (_AUGMENTATION, seed, epoch)
        self._rows = row_ids
        self._calls = 0

    def __len__(self) -> int:
        return len(self._rows)

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Size = ()) -> npt.NDArray[np.float64]:
        """Numbers of at least `low` and below `high`."""
        return low + (high - low) * self._draw(size)

    def integers(self, low: int, high: int, size: Size = ()) -> Int64s:
        """Whole numbers of at least `low` and below `high`."""
        if not low < high:
            raise InvalidInput(
                f"rng.integers({low}, {high}) has nothing to draw from: high must be above low."
            )
        numbers: Int64s = np.floor(low + (high - low) * self._draw(size)).astype(np.int64)
        return numbers

    def normal(self, loc: float = 0.0, scale: float = 1.0, size: Size = ()) -> npt.NDArray[np.float64]:
        """Numbers of the normal distribution (Box and Muller)."""
        radius = np.sqrt(-2.0 * np.log1p(-self._draw(size)))
        numbers: npt.NDArray[np.float64] = loc + scale * radius * np.cos(2.0 * math.pi * self._draw(size))
        return numbers

    def seeds(self) -> Int64s:
        """A seed for each row, of at least 0 and below 2**53, for what takes a seed or a generator of its own."""
        return (self._draw(()) * 2.0**53).astype(np.int64)

    def _draw(self, size: Size) -> npt.NDArray[Any]:
        self._calls += 1
        shape = (size,) if isinstance(size, int) else size
        numbers = draw_uniform(self._rows, math.prod(shape), *self._words, self._calls)
        return numbers.reshape(len(self._rows), *shape)


# ---- what goes into a model and comes out of it


def refuse_large_numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, whose whole numbers become int64. Raises InvalidInput for those that would become others."""
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise InvalidInput(
            f"a column of uint64 has {array.max()}, and the model's whole numbers are int64: give numbers below 2**63, "
            "or cast the column to double."
        )
    return array


def check_numbers(name: str, array: npt.NDArray[Any]) -> None:
    """Raises InvalidInput: a transformation has made no numbers of that column."""
    if array.dtype.kind in "OSUMm":
        first = type(array.flat[0]).__name__ if array.dtype == object and array.size else str(array.dtype)
        raise InvalidInput(
            f"transformation_fn returned column {name!r} as {first}, of which no tensor can be made: return numbers "
            "for it, as many in each row (StringIndexer numbers the classes of a label)."
        )


def find_input_dtype(parameters: Iterable[Any], default: Any) -> Any:
    """The dtype in which a model is given its columns: that of the first parameter that is trained, since a frozen one
    may have fewer bits. default: for models without floating point parameters."""
    floats = [parameter for parameter in parameters if parameter.is_floating_point()]
    trained = [parameter for parameter in floats if parameter.requires_grad]
    return next((parameter.dtype for parameter in trained or floats), default)


def list_output_parts(output: Any) -> tuple[Any, ...]:
    """A model's outputs in order: each member of a tuple, list or dict (as transformers' models return)."""
    if isinstance(output, Mapping):
        return tuple(output.values())
    return tuple(output) if isinstance(output, tuple | list) else (output,)
