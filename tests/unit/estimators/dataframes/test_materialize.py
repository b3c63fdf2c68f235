"""What is said of a table before it is written, and while it is; the names that Spark has for a store."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

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

from spark_elastic.data.store import Store, StoreFull
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframes.materialize import WriteOptions, _Target, warn_about_small_partitions
from spark_elastic.estimators.dataframes.schema import (
    ColumnType,
    check_columns,
    check_validation_column,
    find_column_type,
)
from spark_elastic.estimators.dataframes.store_access import to_spark_url
from spark_elastic.training.spec import DataConfig
from tests.fit_configs import make_config


@pytest.mark.parametrize(
    ("rows", "partitions", "says"),
    [
        (10_000, 2000, ["the table has 2000 partitions, of 5 rows on average"]),
        (10_000, 100, []),  # three seconds
        (10_000_000, 2000, []),
    ],
)
def test_many_small_partitions_are_logged(
    rows: int, partitions: int, says: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spark_elastic"):
        warn_about_small_partitions(rows, partitions)
    assert [message.partition(", and Spark")[0] for message in caplog.messages] == says


OF_PYTHON = "org.apache.spark.api.python.PythonException: Traceback:\n"


@pytest.mark.parametrize(
    ("causes", "raises", "says"),
    [
        # Of a local folder, as py4j gives it.
        (
            "org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device",
            StoreFull,
            r"^Spark cannot write the rows to the store .* \(org.* No space left on device\): make room .*\.$",
        ),
        ("java.io.IOException: Disk quota exceeded", StoreFull, "Disk quota exceeded"),
        # Of tasks in Python.
        (
            f"{OF_PYTHON}spark_elastic.data.store.StoreFull: Cannot write 'data/a' (No space left on device).",
            StoreFull,
            r"\(Cannot write 'data/a' \(No space left on device\)\): make room",
        ),
        (
            f"{OF_PYTHON}ModuleNotFoundError: No module named 'spark_elastic'",
            InvalidInput,
            "install it there, or write them with row_order='table'",
        ),
        # A Python function of the user ended.
        (f"{OF_PYTHON}OSError: No space left on device", ValueError, "^An error"),
    ],
)
def test_sparks_lack_of_room_is_one_sentence(causes: str, raises: type[Exception], says: str) -> None:
    rows: Any = MagicMock()
    rows.sparkSession.version = "4.0.0"
    writer = rows.write.options.return_value.mode.return_value
    writer.parquet.side_effect = ValueError(f"An error occurred.\n\tat x.Y\nCaused by: {causes}\n\tat x.Y")
    target = _Target(Store.open("memory://rows"), "data", "", WriteOptions())
    with pytest.raises(raises, match=says):
        target.write(rows, None)


# ---- columns, judged from the schema alone


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


def ask(features: list[str], labels: list[str], weight: str | None = None) -> DataConfig:
    return make_config(feature_cols=features, label_cols=labels, sample_weight_col=weight).data


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
def test_bad_columns_are_named(features: list[str], labels: list[str], weight: str | None, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_columns(SCHEMA, ask(features, labels, weight))


@pytest.mark.parametrize("name", ["held_out", "y", "price"])
def test_a_validation_column_is_of_bools_or_numbers(name: str) -> None:
    check_validation_column(SCHEMA, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("name", "validation column 'name' is string: it must be true, or a number above 0, in the rows to"),
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


# ---- stores by the names that Spark has for them


@pytest.mark.parametrize(
    ("given", "python", "spark"),
    [
        ("/mnt/jobs", "file:///mnt/jobs/a", "file:///mnt/jobs/a"),
        ("/dbfs/jobs", "file:///dbfs/jobs/a", "dbfs:/jobs/a"),
        ("dbfs:/jobs", "file:///dbfs/jobs/a", "dbfs:/jobs/a"),
        (
            "/Volumes/main/default/v/jobs",
            "file:///Volumes/main/default/v/jobs/a",
            "/Volumes/main/default/v/jobs/a",
        ),
        ("dbfs:/Volumes/main/default/v", "file:///Volumes/main/default/v/a", "/Volumes/main/default/v/a"),
        ("memory://jobs", "memory://jobs/a", "memory://jobs/a"),
    ],
)
def test_spark_and_the_store_name_an_object_alike(given: str, python: str, spark: str) -> None:
    store = Store.open(given)
    assert (store.join("a"), to_spark_url(store, "a")) == (python, spark)


@pytest.mark.parametrize(
    ("url", "spark"),
    [
        ("az://jobs/mine", "abfss://jobs@acme.dfs.core.windows.net/mine/a"),
        ("abfs://jobs", "abfss://jobs@acme.dfs.core.windows.net/a"),
        ("abfss://jobs@other.dfs.core.windows.net/x", "abfss://jobs@other.dfs.core.windows.net/x/a"),
    ],
)
def test_an_azure_container_is_named_for_spark_with_the_account_of_the_options(url: str, spark: str) -> None:
    filesystem: Any = SimpleNamespace(account_name="acme", protocol="abfs")
    assert to_spark_url(Store(url, filesystem, "jobs"), "a") == spark
