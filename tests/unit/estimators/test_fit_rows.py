"""Tables that cannot be trained on are told from what Spark says of them, before any job; which must be written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import DoubleType, StringType, StructType

from spark_elastic.data.manifest import Column, Manifest, RowGroup, RowGroups
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframe_rows import DataFrameRows, find_obstacle
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.estimators.fit_rows import choose_group_bytes, plan_rows
from tests.unit.estimators.requests import request


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (SimpleNamespace(isStreaming=True), "is a stream, which has no end: read its source with spark.read"),
        (pd.DataFrame({"x": [1.0]}), r"got pandas\.DataFrame: make one of it with spark\.createDataFrame"),
    ],
)
def test_what_is_no_table_is_refused(table: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        DataFrameRows(table).check(request())


@pytest.mark.parametrize(
    ("more", "sensitive", "refused"),
    [
        ("X", "false", True),
        ("X", "true", False),
        ("X", "TRUE", False),
        ("x", "true", True),
        ("z", "false", False),
    ],
)
def test_columns_that_spark_cannot_tell_apart_are_refused(more: str, sensitive: str, refused: bool) -> None:
    schema = StructType().add("x", DoubleType()).add("y", DoubleType()).add(more, DoubleType())
    session = SimpleNamespace(conf={"spark.sql.caseSensitive": sensitive})
    table: Any = SimpleNamespace(isStreaming=False, schema=schema, columns=schema.names, sparkSession=session)
    if not refused:
        DataFrameRows(table).check(request(materialize="always"))
        return
    with pytest.raises(InvalidInput, match=rf"several columns called 'x' \(x, {more}\).* rename or drop one"):
        DataFrameRows(table).check(request(materialize="always"))


def test_a_validation_column_of_strings_is_refused() -> None:
    schema = StructType().add("x", DoubleType()).add("y", DoubleType()).add("part", StringType())
    table: Any = SimpleNamespace(isStreaming=False, schema=schema, columns=schema.names)
    with pytest.raises(
        InvalidInput, match="The validation column 'part' is string: it must be true, or a number"
    ):
        DataFrameRows(table).check(request(validation="part"))


@pytest.mark.parametrize(
    ("lanes", "batch", "planned"),
    [(None, 256, 14), (8, 256, 8), (64, 256, 64), (256, 300, 256), (256, 100, 100)],
)
def test_row_groups_of_as_many_lanes_as_asked_for_fit_into_memory(
    lanes: int | None, batch: int, planned: int
) -> None:
    asked = request(lanes=lanes)
    size = 2 * choose_group_bytes(asked)  # the largest that is left whole
    groups = RowGroups.of(RowGroup(0, number, size // 8, size) for number in range(500))
    manifest = Manifest((Column("x", "float64"),), ("a.parquet",), groups, "", "")
    plan = plan_rows(asked, manifest, batch, shuffle=True)
    assert plan.lanes == planned
    assert (plan.lanes + 2) * size <= DEFAULT_CACHE_BYTES


@pytest.mark.parametrize(
    "asked",
    [
        {"materialize": "never"},
        {"materialize": "never", "row_order": "table"},
        {"row_order": "table"},
        {"shuffle": False},
        {"row_order": "table", "terminate_on_nan": False, "missing": MissingValues(nans="keep")},
    ],
)
def test_rows_in_the_table_s_own_order_may_stay_where_they_are(asked: dict[str, Any]) -> None:
    assert find_obstacle(request(**asked)) is None


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "the order of their hash sorts the rows"),
        ({"row_order": "hash", "shuffle": False}, "the order of their hash sorts the rows"),
        ({"row_order": "hash", "materialize": "never"}, "the order of their hash sorts the rows"),
        ({"row_order": "table", "validation": 0.2}, "validation splits the rows"),
        ({"row_order": "table", "validation": "seen"}, "validation splits the rows"),
        ({"row_order": "table", "missing": MissingValues("drop")}, "missing leaves out rows"),
        ({"row_order": "table", "missing": MissingValues(nans="drop")}, "missing leaves out rows"),
        ({"row_order": "table", "terminate_on_nan": False}, "NaN is looked for while rows are written"),
    ],
)
def test_rows_that_are_sorted_split_or_checked_are_written(asked: dict[str, Any], says: str) -> None:
    assert says in str(find_obstacle(request(**asked)))
