"""What is wrong with a table for predictions is said before anything of it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.transformer import ElasticModel


@pytest.mark.parametrize(
    ("wanted", "column"),
    [
        ({}, "prediction"),
        ({"label_cols": ["y"]}, "prediction"),
        ({"prediction_col": "class", "probability_col": "p"}, "p"),
        ({"output_cols": ["a", "b"], "label_cols": ["y", "z"]}, "b"),
    ],
)
def test_a_column_that_is_there_already_is_named_before_any_job(wanted: dict[str, Any], column: str) -> None:
    predictor: Any = SimpleNamespace(columns=(), needs_sample=True)  # whose widths a job would tell
    model = ElasticModel(predictor, SimpleNamespace())  # type: ignore[arg-type]
    model._set(**wanted)
    with pytest.raises(InvalidInput, match=f"the table has a column {column!r} already"):
        model._transform(SimpleNamespace(columns=["x", column]))  # type: ignore[arg-type]
