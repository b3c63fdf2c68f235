"""Columns are judged from the schema alone: no session, no job."""

from __future__ import annotations

import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    FloatType,
    LongType,
    StringType,
    StructType,
)

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframes.schema import (
    ColumnType,
    check_columns,
    check_validation_column,
    compute_row_bytes,
    find_column_type,
)
from spark_elastic.training.fit_config import DataConfig
from tests.fit_configs import make_config

SCHEMA = (
    StructType()
    .add("x", ArrayType(ArrayType(FloatType())))
    .add("v", VectorUDT())
    .add("y", LongType())
    .add("name", StringType())
    .add("price", DecimalType(10, 2))
    .add("image", BinaryType())
    .add("day", DateType())
    .add("tags", ArrayType(StringType()))
    .add("held_out", BooleanType())
)


@pytest.mark.parametrize(
    ("names", "size"), [(["y", "price", "day"], 24), (["y", "v"], None), (["name"], None)]
)
def test_a_rows_bytes_are_known_where_all_rows_have_as_many(names: list[str], size: int | None) -> None:
    assert compute_row_bytes(find_column_type(SCHEMA, name, transformed=True) for name in names) == size


def ask(features: list[str], labels: list[str], weight: str | None = None) -> DataConfig:
    return make_config(feature_cols=features, label_cols=labels, sample_weight_col=weight).data


def test_supported_columns_are_accepted() -> None:
    check_columns(SCHEMA, ask(["x", "v"], ["y"], "y"))
    assert find_column_type(SCHEMA, "x") == ColumnType("float32", 2, vector=False)
    assert find_column_type(SCHEMA, "v") == ColumnType("float32", 1, vector=True)
    assert find_column_type(SCHEMA, "price") == ColumnType("float64", 0, cast="double")


def test_a_transformation_accepts_columns_of_other_types() -> None:
    check_columns(SCHEMA, ask(["image", "day", "name", "tags"], ["y"]), transformed=True)
    assert find_column_type(SCHEMA, "day", transformed=True).dtype == "datetime64[D]"
    assert find_column_type(SCHEMA, "tags", transformed=True) == ColumnType("object", 1)
    with pytest.raises(InvalidInput, match=r"weight column 'day'.*one number"):
        check_columns(SCHEMA, ask(["x"], ["y"], "day"), transformed=True)


@pytest.mark.parametrize(
    ("features", "labels", "weight", "says"),
    [
        (["z"], ["y"], None, r"no feature column 'z': the DataFrame has the columns \['x', 'v', 'y'"),
        (["x"], ["label"], None, "no label column 'label'"),
        (["x"], ["y"], "w", "no sample weight column 'w'"),
        (["x"], ["y"], "v", "sample weight column 'v' is vector: it must be one number"),
        (["name"], ["y"], None, "feature column 'name' is string.*StringIndexer"),
        (["tags"], ["y"], None, "feature column 'tags' is array<string>.*StringIndexer"),
        (["image"], ["y"], None, "'image' is binary.*a transformation_fn that decodes it"),
        (["day"], ["y"], None, "'day' is date.*unix_timestamp"),
    ],
)
def test_bad_columns_are_one_sentence(
    features: list[str], labels: list[str], weight: str | None, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_columns(SCHEMA, ask(features, labels, weight))


@pytest.mark.parametrize("name", ["held_out", "y", "price"])
def test_a_validation_column_is_of_bools_or_numbers(name: str) -> None:
    check_validation_column(SCHEMA, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "name",
            "validation column 'name' is string: it must be true, or a number above 0, in the rows to validate",
        ),
        ("v", "validation column 'v' is vector"),
        ("day", "validation column 'day' is date"),
        ("z", r"There is no validation column 'z': the DataFrame has the columns"),
    ],
)
def test_a_validation_column_of_another_type_is_refused(name: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_validation_column(SCHEMA, name)


def test_an_unknown_column_of_a_wide_table_gets_the_nearest_names() -> None:
    names = ["price", *(f"c{number}" for number in range(300))]
    schema = types.StructType([types.StructField(name, types.DoubleType()) for name in names])
    with pytest.raises(InvalidInput) as error:
        check_columns(schema, ask(["prices"], ["c1"]))
    assert str(error.value) == (
        "There is no feature column 'prices': the DataFrame has 301 columns, of which the nearest are ['price']."
    )
