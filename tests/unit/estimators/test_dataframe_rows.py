"""Which requests need a DataFrame's rows written, whatever its plan is."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.estimators.dataframe_rows import refuse_conversions
from spark_elastic.estimators.dataframes.file_scan import NoFileScan
from spark_elastic.estimators.dataframes.scan import MissingValues
from tests.unit.estimators.requests import request


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
    refuse_conversions(request(**asked))


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
    with pytest.raises(NoFileScan, match=says):
        refuse_conversions(request(**asked))
