"""A table's columns as a fitted model takes them: checked by the schema, before any job, against the trained ones.

What a schema cannot tell (nulls, lengths, values beyond a dtype) `stacking` finds in the rows. Caller's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DateType, TimestampType

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.spark.dataframes.missing import quoted
from spark_elastic.spark.dataframes.schema import ColumnType, column_type

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

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
