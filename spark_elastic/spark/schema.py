"""Which columns of a DataFrame can be trained on, and what they become: checked from its schema, before any job.

Owns the mapping from Spark's types to numpy's. Knows nothing of stores or files. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from spark_elastic.errors import InvalidInput

VECTOR_DTYPE = "float32"
_DTYPES: dict[type[DataType], str] = {
    BooleanType: "bool",
    ByteType: "int8",
    ShortType: "int16",
    IntegerType: "int32",
    LongType: "int64",
    FloatType: "float32",
    DoubleType: "float64",
}


@dataclass(frozen=True)
class ColumnType:
    """What a Spark column becomes: numpy's dtype, how many dimensions a row has, and whether it is an ML vector."""

    dtype: str
    dimensions: int
    vector: bool


def check_columns(
    schema: StructType,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    sample_weight_col: str | None = None,
    extra_cols: Iterable[str] = (),
) -> None:
    """InvalidInput unless every column exists and holds numbers; starts no job.

    Numbers: numeric and boolean columns, arrays of them (nested too), ML vectors. A sample weight is one number a row.
    """
    if not feature_cols:
        raise InvalidInput(f"feature_cols is empty: name at least one of the columns {schema.names}.")
    weights = [] if sample_weight_col is None else [sample_weight_col]
    roles = (
        ("feature", feature_cols),
        ("label", label_cols),
        ("sample weight", weights),
        ("extra", list(extra_cols)),
    )
    for role, names in roles:
        for name in names:
            found = column_type(schema, name, role)
            if role == "sample weight" and found.dimensions:
                raise InvalidInput(
                    f"The sample weight column {name!r} is {schema[name].dataType.simpleString()}: "
                    f"it must be one number a row."
                )


def column_type(schema: StructType, name: str, role: str = "") -> ColumnType:
    """What the column becomes; InvalidInput where it is missing or holds no numbers. `role` is for the message."""
    called = f"{role} column {name!r}".strip()
    if name in schema.names:
        return _column_type(schema[name].dataType, called)
    raise InvalidInput(f"There is no {called}: the DataFrame has the columns {schema.names}.")


def _column_type(spark_type: DataType, called: str) -> ColumnType:
    if isinstance(spark_type, VectorUDT):
        return ColumnType(VECTOR_DTYPE, 1, vector=True)
    element, dimensions = spark_type, 0
    while isinstance(element, ArrayType):
        element, dimensions = element.elementType, dimensions + 1
    dtype = _DTYPES.get(type(element))
    if dtype is None:
        raise InvalidInput(
            f"The {called} is {spark_type.simpleString()}, which cannot be trained on: {_advice(element)}."
        )
    return ColumnType(dtype, dimensions, vector=False)


def _advice(element: DataType) -> str:
    if isinstance(element, StringType):
        return "index or encode the strings first (StringIndexer, OneHotEncoder, HashingTF)"
    if isinstance(element, DecimalType):
        return "cast it to double"
    return "give numbers, booleans, arrays of them or ML vectors"
