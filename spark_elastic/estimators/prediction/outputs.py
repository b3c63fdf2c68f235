"""What `transform` makes of a model's outputs: which columns, and what is in them. Pure numpy; any thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DateType, TimestampType

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.spark.dataframes.scan import quoted
from spark_elastic.spark.dataframes.schema import ColumnType, column_type

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame


Floats = npt.NDArray[np.float64]
ACTIVATIONS = ("softmax", "sigmoid", "exp", "identity")


@dataclass(frozen=True)
class Outputs:
    """Columns and the numbers that a row has in each; 1 is a plain double.

    activation: None, or what makes class probabilities of the one output: then the columns are the class, as a double,
    and the probabilities.
    """

    columns: tuple[str, ...]
    widths: tuple[int, ...]
    activation: str | None = None

    @classmethod
    def of(
        cls,
        widths: Sequence[int],
        prediction_col: str,
        probability_col: str | None = None,
        activation: str | None = None,
        output_cols: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> Outputs:
        """widths: numbers a row of each output of the model. Raises InvalidInput where the columns do not fit it."""
        if probability_col is None:
            if output_cols is None:
                output_cols = (
                    [prediction_col] if len(widths) == 1 else [f"{label}__output" for label in labels]
                )
            if len(output_cols) != len(widths):
                raise InvalidInput(
                    f"the model has {len(widths)} outputs: name as many columns in output_cols, not {len(output_cols)}."
                )
            return cls(tuple(output_cols), tuple(widths))
        if len(widths) != 1 or output_cols is not None:
            raise InvalidInput(
                "probability_col needs a model of one output and no output_cols: leave one out."
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
        return cls((prediction_col, probability_col), (1, max(2, widths[0])), activation)

    @staticmethod
    def known(
        prediction_col: str,
        probability_col: str | None = None,
        output_cols: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """The columns that there will be, where their number does not depend on the model's outputs; else none."""
        if probability_col is not None:
            return (prediction_col, probability_col)
        if output_cols is not None:
            return tuple(output_cols)
        return (prediction_col,) if len(labels) <= 1 else ()

    def values(self, outputs: Sequence[Floats]) -> list[Floats]:
        """outputs: (rows, width) each. Returns, for each column, (rows, its width)."""
        if self.activation is None:
            return list(outputs)
        probabilities = _probabilities(outputs[0], self.activation)
        return [probabilities.argmax(1).astype(np.float64)[:, None], probabilities]


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


def as_column(values: Floats) -> Any:
    """(rows, 1) as plain numbers, anything wider as a list of arrays."""
    return values[:, 0] if values.shape[1] == 1 else list(values)


# A table's columns as a fitted model takes them: checked by the schema, before any job, against the trained ones.
#
# What a schema cannot tell (nulls, lengths, values beyond a dtype) `stacking` finds in the rows. Caller's thread.


# Which kinds of numpy's dtypes may stand for which, since each value stays what it is or is refused in the rows.
_TAKES = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "O": "O"}


def model_input(dataset: DataFrame, column: Column) -> SparkColumn:
    """The column, as it is to be handed to the model's Python worker.

    Raises:
        InvalidInput: there is no column of that name, or its type is another than in training.
    """
    if column.name not in dataset.columns:
        raise InvalidInput(
            f"column {column.name!r} is not in the table; it has: {', '.join(dataset.columns)}."
        )
    spark_type = dataset.schema[column.name].dataType
    given = column_type(dataset.schema, column.name, transformed=True)
    if not _fits(given, column):
        trained = f"{column.dtype} of shape {column.shape}" if column.shape else column.dtype
        raise InvalidInput(
            f"column {column.name!r} is {spark_type.simpleString()}; the model was trained on {trained}: cast it to "
            "what it was in training."
        )
    return _plain(quoted(column.name), spark_type, given)


def folding(dataset: DataFrame) -> Callable[[str], str]:
    """Of names: equal for those that the session takes for one."""
    sensitive = dataset.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true"
    return str if sensitive else str.lower


def _fits(given: ColumnType, column: Column) -> bool:
    trained = np.dtype(column.dtype)
    if trained.kind == "M":
        alike = given.dtype == column.dtype
    else:
        alike = np.dtype(given.dtype).kind in _TAKES.get(trained.kind, "")
    # How deep arrays were before `input_shapes` is not known.
    deep = bool(column.shape) if given.dimensions else math.prod(column.shape) == 1
    return alike and deep


def _plain(reference: SparkColumn, spark_type: DataType, given: ColumnType) -> SparkColumn:
    if given.vector:
        return vector_to_array(reference)
    if given.cast is not None:  # decimals
        return reference.cast(given.cast)
    return _numbers(reference, spark_type)


def _numbers(reference: SparkColumn, spark_type: DataType) -> SparkColumn:
    """Dates and timestamps as in training, in no time zone of a session, at any depth."""
    depth, element = 0, spark_type
    while isinstance(element, ArrayType):
        depth, element = depth + 1, element.elementType
    change: Callable[[SparkColumn], SparkColumn]
    if isinstance(element, TimestampType):
        change = F.unix_micros
    elif isinstance(element, DateType):
        change = F.unix_date
    else:
        return reference
    for _ in range(depth):
        change = _each(change)
    return change(reference)


def _each(change: Callable[[SparkColumn], SparkColumn]) -> Callable[[SparkColumn], SparkColumn]:
    return lambda array: F.transform(array, change)
