"""A column that is not what the model was trained on is refused from the schema alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.transformer import model_input


def arrays(kind: DataType, depth: int = 1) -> DataType:
    return ArrayType(arrays(kind, depth - 1)) if depth else kind


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        (DoubleType(), "int32", ()),
        (DecimalType(), "int64", ()),
        (VectorUDT(), "int64", (3,)),
        (IntegerType(), "bool", ()),
        (StringType(), "float32", ()),
        (IntegerType(), "object", ()),
        (DateType(), "datetime64[us]", ()),
        (TimestampType(), "datetime64[D]", ()),
        (IntegerType(), "datetime64[D]", ()),
        (arrays(DoubleType()), "float32", ()),
        (DoubleType(), "float32", (2,)),
    ],
)
def test_a_column_of_another_type_is_refused(kind: DataType, dtype: str, shape: tuple[int, ...]) -> None:
    table: Any = SimpleNamespace(columns=["x"], schema=StructType([StructField("x", kind)]))
    with pytest.raises(InvalidInput) as error:
        model_input(table, Column("x", dtype, shape))
    sentence = f"column 'x' is {kind.simpleString()}; the model was trained on {dtype}"
    assert str(error.value).startswith(sentence)
    with pytest.raises(InvalidInput, match="There is no column 'y': the DataFrame has the columns "):
        model_input(table, Column("y", "int64"))
