"""A column that is not what the model was trained on is refused from the schema alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators import transformer
from spark_elastic.estimators.dataframes import scan
from spark_elastic.estimators.transformer import model_input


@pytest.fixture(autouse=True)
def _said(monkeypatch: Any) -> None:
    """Expressions as text: without a JVM there are none of Spark's."""

    class Text(str):
        def cast(self, name: str) -> Text:
            return Text(f"{self}::{name}")

        def isNotNull(self) -> Text:
            return Text(f"{self} is not null")

    functions = SimpleNamespace(
        col=Text,
        when=lambda condition, value: Text(f"{value} if {condition}"),
        unix_date=lambda c: Text(f"unix_date({c})"),
        unix_micros=lambda c: Text(f"unix_micros({c})"),
        transform=lambda c, change: Text(f"each({c}, {change(Text('e'))})"),
    )
    for module in (transformer, scan):
        monkeypatch.setattr(module, "F", functions)
    monkeypatch.setattr(scan, "vector_to_array", lambda c, dtype: Text(f"vector_to_array({c}, {dtype})"))


def convert_input(kind: DataType, dtype: str, shape: tuple[int, ...] = (), name: str = "x") -> str:
    table: Any = SimpleNamespace(columns=[name], schema=StructType([StructField(name, kind)]))
    return str(model_input(table, Column(name, dtype, shape)))


def test_a_column_that_stays_as_it_is_costs_no_call_of_the_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of columns would take seconds."""
    for module in (transformer, scan):
        monkeypatch.setattr(module, "F", SimpleNamespace())
    assert convert_input(DoubleType(), "float32", (), "a.b") == "`a.b`"


def arrays(kind: DataType, depth: int = 1) -> DataType:
    return ArrayType(arrays(kind, depth - 1)) if depth else kind


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "expression"),
    [
        (IntegerType(), "int32", (), "`x`"),
        (LongType(), "int32", (), "`x`"),
        (BooleanType(), "int64", (), "`x`"),
        (DoubleType(), "float32", (1,), "`x`"),
        (DecimalType(), "float64", (), "`x`::double"),
        (arrays(DecimalType(), 2), "float64", (2, 2), "`x`::array<array<double>>"),
        (arrays(DoubleType()), "float32", (1, 2, 2), "`x`"),
        (VectorUDT(), "float32", (3,), "vector_to_array(`x`, float32) if `x` is not null"),
        (BinaryType(), "object", (), "`x`"),
        (DateType(), "datetime64[D]", (), "unix_date(`x`)"),
        (arrays(DateType()), "datetime64[D]", (2,), "each(`x`, unix_date(e))"),
        (arrays(TimestampType(), 2), "datetime64[us]", (2, 1), "each(`x`, each(e, unix_micros(e)))"),
    ],
)
def test_a_column_of_a_fitting_type_is_converted(
    kind: DataType, dtype: str, shape: tuple[int, ...], expression: str
) -> None:
    assert convert_input(kind, dtype, shape) == expression


def test_a_column_of_any_name_is_quoted() -> None:
    assert convert_input(LongType(), "int64", name="a.b`c") == "`a.b``c`"


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
    sentence = f"column 'x' is {kind.simpleString()}; the model was trained on {dtype}"
    with pytest.raises(InvalidInput) as error:
        convert_input(kind, dtype, shape)
    assert str(error.value).startswith(sentence)


def test_a_column_that_is_not_there_is_named() -> None:
    table: Any = SimpleNamespace(
        columns=["a", "b"], schema=StructType([StructField(n, LongType()) for n in "ab"])
    )
    with pytest.raises(InvalidInput, match="There is no column 'x': the DataFrame has the columns "):
        model_input(table, Column("x", "int64"))
