"""What is wrong with a table for predictions is said before anything of it is asked for; the history of a fit."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
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
from spark_elastic.estimators import transformer
from spark_elastic.estimators.dataframes.scan import MissingKind
from spark_elastic.estimators.predict_udf import MissingRows
from spark_elastic.estimators.transformer import (
    ElasticModel,
    FitSummary,
    WorldRecord,
    _check_new,
    model_input,
    try_shapes,
)
from spark_elastic.monitoring.report import JobReport, WorldChange, WorldChangeKind


def table(columns: list[str], sensitive: str = "false") -> Any:
    session = SimpleNamespace(conf={"spark.sql.caseSensitive": sensitive})
    return SimpleNamespace(columns=columns, sparkSession=session, isStreaming=False)


@pytest.mark.parametrize(
    ("wanted", "column"),
    [
        ({}, "prediction"),
        ({"label_cols": ["y"]}, "prediction"),
        ({"prediction_col": "class", "probability_col": "p", "activation": "softmax"}, "p"),
        ({"activation": "softmax"}, "rawPrediction"),
        ({"output_cols": ["a", "b"], "label_cols": ["y", "z"]}, "b"),
    ],
)
def test_a_column_that_is_there_already_is_named_before_any_job(wanted: dict[str, Any], column: str) -> None:
    predictor: Any = SimpleNamespace(columns=(), needs_sample=True)  # whose outputs' shapes a job would tell
    model = ElasticModel(predictor, SimpleNamespace())  # type: ignore[arg-type]
    model._set(**wanted)
    with pytest.raises(InvalidInput, match=f"the table has a column {column!r} already"):
        model._transform(table(["x", column]))


def test_a_table_of_pandas_is_refused() -> None:
    model = ElasticModel(SimpleNamespace(columns=()), SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"transform takes a DataFrame of Spark; got pandas.DataFrame: "):
        model.transform(pd.DataFrame({"x": [1.0]}))  # type: ignore[arg-type]


def test_columns_of_another_table_take_the_places_of_the_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `setFeaturesCol` of Spark ML's own models does."""
    trained = (Column("a", "float32", (2,)), Column("b", "int64", ()))
    predictor: Any = SimpleNamespace(columns=trained)
    model = ElasticModel(predictor, SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(transformer, "model_input", lambda dataset, column: column)
    found = model._find_inputs(table([]))  # of a model that was made without an estimator
    assert found == [("a", trained[0]), ("b", trained[1])]
    renamed = model.copy({model.feature_cols: ["c", "a"]})
    moved = [("c", Column("c", "float32", (2,))), ("a", Column("a", "int64", ()))]
    assert renamed._find_inputs(table([])) == moved
    model.setFeatureCols("c")
    with pytest.raises(InvalidInput, match="feature_cols names c, and the model was trained on a, b: name"):
        model._find_inputs(table([]))
    with pytest.raises(InvalidInput, match=r"several columns called 'c' \(c, C\), which Spark cannot tell"):
        renamed._find_inputs(table(["c", "a", "C"]))


def test_missing_values_are_refused_in_the_words_of_fit_or_their_rows_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds, numbers = (MissingKind("x", "NaN"), MissingKind("v", "nulls")), np.array([-1, 1, 1])
    with pytest.raises(InvalidInput, match=r"column 'v' has nulls in 2 of 3 rows of a batch: fill .* or dr"):
        MissingRows(kinds, (True, False)).check(numbers)
    with pytest.raises(InvalidInput, match=r"column 'x' has NaN in 1 of 1 rows of a batch: .*'nans': 'keep'"):
        MissingRows(kinds, (False, True)).check(np.array([0]))
    rows = MissingRows(kinds, (True, True))
    assert rows.check(numbers).tolist() == [True, False, False]
    rows.log(Counter(numbers))
    rows.log(Counter([-1]))
    assert caplog.messages == ["transform left out 2 of 3 rows (nulls in 'v': 2) of a task"]


def test_outputs_are_tried_on_a_row_of_the_training() -> None:
    class TorchPredictor:
        def shapes(self, sample: Any = None) -> list[tuple[int, ...]]:
            return [(len(sample[0][0]),)]

    predictor: Any = TorchPredictor()
    assert try_shapes(predictor, None) is None
    assert try_shapes(predictor, ["abc"]) == [(3,)]
    assert try_shapes(predictor, [None]) is None  # what it raises, `transform` will


def test_names_are_compared_as_the_session_compares_them() -> None:
    with pytest.raises(InvalidInput, match="the table has a column 'Prediction' already"):
        _check_new(table(["x", "Prediction"]), ["prediction"])
    _check_new(table(["x", "Prediction"], sensitive="true"), ["prediction"])
    with pytest.raises(InvalidInput, match="would be called p, P: give each another name"):
        _check_new(table(["x"]), ["p", "P"])
    _check_new(table(["x"], sensitive="true"), ["p", "P"])


def test_epochs_of_different_numbers_are_rows_of_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    # A callback's numbers need not be of one type.
    first_epoch = {"epoch": 0, "loss": 2.0, "rows": 5, "gap": 0.5}
    epochs = (first_epoch, {"epoch": 1, "aux": 9.0, "loss": 1.0, "rows": 5, "gap": 1})
    summary: Any = SimpleNamespace(epochs=epochs)
    fitted = ElasticModel(SimpleNamespace(columns=()), summary)  # type: ignore[arg-type]

    def make_frame(rows: Any, names: Any) -> Any:
        return [dict(zip(names, row, strict=True)) for row in rows]

    session = SimpleNamespace(createDataFrame=make_frame)
    monkeypatch.setattr(transformer.SparkSession, "active", lambda: session)
    assert fitted.getHistory()["gap"] == [0.5, 1]
    assert fitted.getHistory()["aux"] == [None, 9.0]
    first, second = fitted.history_frame()
    assert first == {**epochs[0], "aux": None}
    assert second == epochs[1]
    assert [type(value) for value in second.values()] == [int, float, int, float, float]


def test_a_summary_survives_json() -> None:
    worlds = (WorldChange(1, 0.0, WorldChangeKind.START, 0, 2, 2, 0, "first", 0.5),)
    epochs = ({"epoch": 0, "loss": 0.5, "rows": 10},)
    report = JobReport(10.0, {"training": 9.0}, worlds).with_rows(list(epochs), 10)
    sizes = (WorldRecord(0.0, 3, "start"), WorldRecord(4.5, 2, "lost 0"))
    summary = FitSummary("r", epochs, sizes, seconds=9.0, data_rows=10, digest="ab", report=report)
    assert FitSummary.from_json(summary.to_json()) == summary
    assert summary.rows_per_epoch == [10]


# ---- columns, from the schema alone


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
