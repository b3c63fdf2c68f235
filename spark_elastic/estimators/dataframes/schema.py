"""Checks from a DataFrame's schema, before any job, that its columns can be trained on, and finds their types.

Maps Spark's types to numpy's. Knows nothing of stores or files. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput, format_columns

if TYPE_CHECKING:
    from spark_elastic.training.spec import DataConfig

VECTOR_DTYPE = "float32"
_DTYPES: dict[type[DataType], str] = {
    BooleanType: "bool",
    ByteType: "int8",
    ShortType: "int16",
    IntegerType: "int32",
    LongType: "int64",
    FloatType: "float32",
    DoubleType: "float64",
    DecimalType: "float64",
}
# Types that only a transformation turns into numbers.
_RAW_DTYPES: dict[type[DataType], str] = {
    BinaryType: "object",
    StringType: "object",
    DateType: "datetime64[D]",
    TimestampType: "datetime64[us]",
    TimestampNTZType: "datetime64[us]",
}


@dataclass(frozen=True)
class ColumnType:
    """The type in which a Spark column is written and read."""

    dtype: str  # numpy's dtype
    dimensions: int  # dimensions of a row; 0: a single number
    vector: bool = False  # whether it is an ML vector
    cast: str | None = None  # Spark's name of the type that it is cast to before it is written; None: no cast


def check_is_dataframe(df: object, call: str) -> None:
    """Raise InvalidInput if what a call was given is no DataFrame of Spark, such as one of pandas."""
    if not hasattr(df, "isStreaming"):
        raise InvalidInput(
            f"{call} takes a DataFrame of Spark; got {describe_class(df)}: make one of it with spark.createDataFrame."
        )


def describe_class(value: object) -> str:
    """The class of a value with the package that it is from, such as pandas.DataFrame."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "builtins" else f"{package}.{kind.__qualname__}"


def check_columns(schema: StructType, data: DataConfig, transformed: bool = False) -> None:
    """Raise InvalidInput unless every column exists and holds numbers, arrays of them, or ML vectors; with
    `transformed`, a transformation makes numbers of bytes (images), strings, dates and timestamps."""
    weights = [] if data.sample_weight_col is None else [data.sample_weight_col]
    roles = {"feature": data.feature_cols, "label": data.label_cols, "sample weight": weights}
    for role, names in roles.items():
        for name in names:
            found = find_column_type(schema, name, role, transformed)
            if role == "sample weight" and (found.dimensions or found.dtype not in _DTYPES.values()):
                kind = get_type(schema, name).simpleString()
                raise InvalidInput(f"The sample weight column {name!r} is {kind}: it must be one number.")


def check_distinct_names(df: DataFrame, used: Iterable[str]) -> None:
    """Raise InvalidInput if the session takes another column of the table for one of those that are used."""
    folded = get_name_folding(df)
    seen: dict[str, list[str]] = {}
    for each in df.columns:
        seen.setdefault(folded(each), []).append(each)
    for name in used:
        alike = seen.get(folded(name), [])
        if len(alike) > 1:
            raise InvalidInput(
                f"The table has several columns called {name!r} ({', '.join(alike)}), which Spark cannot tell apart: "
                "rename or drop one of them (df.toDF, df.drop), or set spark.sql.caseSensitive=true if they differ in "
                "case."
            )


def get_name_folding(df: DataFrame) -> Callable[[str], str]:
    """A function that makes equal strings of names that the session takes for one."""
    sensitive = str(df.sparkSession.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"
    return str if sensitive else str.lower


def check_validation_column(schema: StructType, name: str) -> None:
    """Raise InvalidInput unless the column marks rows by booleans or numbers; starts no job."""
    _check_presence(schema, name, f"validation column {name!r}")
    if type(get_type(schema, name)) not in _DTYPES:
        raise InvalidInput(
            f"The validation column {name!r} is {get_type(schema, name).simpleString()}: it must be true, or a number "
            f"above 0, in the rows to validate with; make such a column of it (df.withColumn)."
        )


def find_column_type(schema: StructType, name: str, role: str = "", transformed: bool = False) -> ColumnType:
    """The type in which the column is written. Raises InvalidInput if it is missing or holds no numbers."""
    called = f"{role} column {name!r}".strip()
    _check_presence(schema, name, called)
    return _find_column_type(get_type(schema, name), called, transformed)


def _check_presence(schema: StructType, name: str, called: str) -> None:
    if name not in schema.names:
        raise InvalidInput(f"There is no {called}: the DataFrame has {format_columns(name, schema.names)}.")


def get_type(schema: StructType, name: str) -> DataType:
    """The column's type: `schema[name]` compares names one by one in Python."""
    return schema.fields[schema.names.index(name)].dataType


def compute_row_bytes(types: Iterable[ColumnType]) -> int | None:
    """Bytes of each row of these columns; None if rows may differ: arrays, vectors, strings."""
    kinds = list(types)
    if any(kind.dimensions or kind.dtype == "object" for kind in kinds):
        return None
    return sum(Column("", kind.dtype).row_bytes for kind in kinds)


def _find_column_type(spark_type: DataType, called: str, transformed: bool) -> ColumnType:
    if isinstance(spark_type, VectorUDT):
        return ColumnType(VECTOR_DTYPE, 1, vector=True)
    element, dimensions = spark_type, 0
    while isinstance(element, ArrayType):
        element, dimensions = element.elementType, dimensions + 1
    dtype = _DTYPES.get(type(element))
    if dtype is None and transformed:
        dtype = _RAW_DTYPES.get(type(element))
    if dtype is None:
        raise InvalidInput(
            f"The {called} is {spark_type.simpleString()}, which cannot be trained on: {_advice(element)}."
        )
    decimals = (
        "array<" * dimensions + "double" + ">" * dimensions if isinstance(element, DecimalType) else None
    )
    return ColumnType(dtype, dimensions, cast=decimals)


def _advice(element: DataType) -> str:
    if isinstance(element, StringType):
        return "index or encode the strings (StringIndexer, OneHotEncoder, HashingTF), or give a transformation_fn"
    if isinstance(element, DateType | TimestampType | TimestampNTZType):
        return "make numbers of it (unix_timestamp, dayofweek, month), or give a transformation_fn"
    if isinstance(element, BinaryType):
        return "give a transformation_fn that decodes it"
    return "give numbers, booleans, arrays of them or ML vectors"
