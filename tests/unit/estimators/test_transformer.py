"""What is wrong with a table for predictions, which columns outputs become, and the history of a fit."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
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
from spark_elastic.estimators.outputs import OutputColumns, Outputs
from spark_elastic.estimators.predict_udf import MissingRows
from spark_elastic.estimators.torch_objects import find_activation
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


# ---- what columns a model's outputs become


DEFAULTS: dict[str, Any] = {
    "prediction_col": "prediction",
    "probability_col": "probability",
    "raw_prediction_col": "rawPrediction",
    "threshold": 0.5,
    "thresholds": None,
    "activation": None,
    "raw_outputs": False,
    "output_cols": None,
    "label_cols": [],
}
THREE = ("rawPrediction", "probability", "prediction")


def outputs(shapes: list[Any], implied: str | None = None, **given: Any) -> Outputs:
    """shapes: of a row of each output, or its width."""
    wanted = OutputColumns.from_params(DEFAULTS | given, given, implied)
    return Outputs.of([(each,) if isinstance(each, int) else each for each in shapes], wanted)


def test_one_output_has_one_column_and_several_have_labels_or_names_of_their_own() -> None:
    assert outputs([1]).columns == ("prediction",)
    assert outputs([1], output_cols=["y__output"]).columns == ("y__output",)
    assert outputs([1, 3], label_cols=["a", "b"]).columns == ("a__output", "b__output")


class Focal(torch.nn.CrossEntropyLoss):
    """A loss of classes of the user's."""


@pytest.mark.parametrize(
    ("loss", "activation"),
    [
        (torch.nn.CrossEntropyLoss(), "softmax"),
        ([torch.nn.CrossEntropyLoss()], "softmax"),
        (partial(F.cross_entropy, label_smoothing=0.1), "softmax"),
        (Focal(), "softmax"),
        (torch.nn.NLLLoss(), "exp"),
        (F.nll_loss, "exp"),
        (torch.nn.BCELoss(), "probability"),
        (F.binary_cross_entropy, "probability"),
        (torch.nn.BCEWithLogitsLoss(), "sigmoid"),
        (F.binary_cross_entropy_with_logits, "sigmoid"),
        (torch.nn.MultiMarginLoss(), "softmax"),
        (F.multi_margin_loss, "softmax"),
        (torch.nn.MSELoss(), None),
        (lambda output, label: F.cross_entropy(output, label), None),  # noqa: PLW0108 - the user's own
        ([torch.nn.CrossEntropyLoss(), torch.nn.MSELoss()], None),
        (None, None),
    ],
)
def test_the_loss_says_whether_outputs_are_classes(loss: Any, activation: str | None) -> None:
    assert find_activation(loss) == activation


@pytest.mark.parametrize(
    ("activation", "row", "probabilities", "raw"),
    [
        ("softmax", [0.0, np.log(3.0)], [0.25, 0.75], [-np.log(3.0), np.log(3.0)]),
        ("softmax", [1.0, 1.0, 1.0], [1 / 3, 1 / 3, 1 / 3], [1.0, 1.0, 1.0]),
        ("exp", [np.log(0.25), np.log(0.75)], [0.25, 0.75], [-np.log(3.0), np.log(3.0)]),
        ("identity", [0.75, 0.25], [0.75, 0.25], [0.75, 0.25]),
        ("identity", [0.75], [0.25, 0.75], [0.25, 0.75]),
        ("probability", [0.75], [0.25, 0.75], [0.25, 0.75]),
        ("sigmoid", [np.log(3.0)], [0.25, 0.75], [-np.log(3.0), np.log(3.0)]),
        ("sigmoid", [-1000.0], [1.0, 0.0], [1000.0, -1000.0]),
    ],
)
def test_classes_have_the_three_columns_of_sparks_classifiers(
    activation: str, row: list[float], probabilities: list[float], raw: list[float]
) -> None:
    form = outputs([len(row)], activation)
    assert form == outputs([(1, len(row), 1)], activation=activation)
    assert (form.columns, form.widths) == (THREE, (len(raw), len(raw), 1))
    found = form.values([np.array([row])])
    np.testing.assert_allclose(found[0], [raw])
    np.testing.assert_allclose(found[1], [probabilities], atol=1e-12)
    assert found[2].tolist() == [[float(np.argmax(probabilities))]]
    for name in (None, ""):  # as Spark's own leave a column out
        some = outputs([len(row)], activation, probability_col=name, raw_prediction_col=name)
        assert some.columns == ("prediction",)
        assert [each.tolist() for each in some.values([np.array([row])])] == [found[2].tolist()]


@pytest.mark.parametrize(
    ("given", "probabilities", "classes"),
    [
        ({}, [[0.5, 0.5], [0.4, 0.6]], [0, 1]),
        ({"threshold": 0.7}, [[0.2, 0.8], [0.3, 0.7], [0.4, 0.6]], [1, 0, 0]),
        ({"thresholds": [3, 7]}, [[0.2, 0.8], [0.3, 0.7], [0.4, 0.6]], [1, 0, 0]),
        ({"thresholds": [0.5, 0.0]}, [[1.0, 0.0], [0.9, 0.1]], [0, 1]),
        ({"thresholds": [1.0, 2.0, 0.5]}, [[0.3, 0.5, 0.2], [0.3, 0.59, 0.11]], [2, 0]),
        ({"thresholds": [1.0, 0.0, 1.0]}, [[0.6, 0.1, 0.3], [0.3, 0.0, 0.7]], [1, 2]),
        ({"thresholds": [0.3, 0.7], "threshold": 0.7}, [[0.2, 0.8]], [1]),
    ],
)
def test_thresholds_choose(given: dict[str, Any], probabilities: list[Any], classes: list[int]) -> None:
    rows = np.array(probabilities)
    assert outputs([rows.shape[1]], "identity", **given).values([rows])[2][:, 0].tolist() == classes


@pytest.mark.parametrize(
    ("shapes", "implied"),
    [
        ([3], "probability"),  # labels that do not exclude each other
        ([3], "sigmoid"),
        ([1], "softmax"),
        ([(2, 4)], "softmax"),  # a class for each token
        ([2, 1], "softmax"),
    ],
)
def test_what_cannot_be_a_class_stays_unless_classes_were_asked_for(shapes: list[Any], implied: str) -> None:
    form = outputs(shapes, implied, label_cols=["a", "b"])
    assert form.activation is None
    assert form == outputs(shapes, None, label_cols=["a", "b"])
    with pytest.raises(InvalidInput, match="set raw_outputs=True, for the outputs as they are"):
        outputs(shapes, implied, probability_col="q")


def test_raw_outputs_are_asked_for_and_named() -> None:
    assert outputs([3], "softmax", raw_outputs=True).columns == ("prediction",)
    assert outputs([3], "softmax", output_cols=["scores"]).columns == ("scores",)
    assert outputs([3], activation="softmax", raw_outputs=True).activation is None


@pytest.mark.parametrize(
    ("shapes", "given", "sentence"),
    [
        ([1, 1], {"output_cols": ["a"]}, "2 outputs: name as many columns"),
        ([1, 1], {"probability_col": "q", "activation": "sigmoid"}, "the model has 2: let transform"),
        ([2], {"probability_col": "q"}, "probability_col needs activation, one of softmax"),
        ([2], {"thresholds": [1, 1]}, "thresholds needs activation"),
        ([1], {"activation": "softmax"}, "softmax makes no class probabilities of 1"),
        ([2], {"activation": "sigmoid"}, "sigmoid makes no class probabilities of 2"),
        ([(2, 4)], {"activation": "softmax"}, r"one number each, and the model returns \(2, 4\) a row"),
        ([3], {"activation": "softmax", "thresholds": [1, 2]}, "2 numbers and the model 3 classes"),
        ([3], {"activation": "softmax", "threshold": 0.3}, "the model has 3: give thresholds"),
        ([2], {"activation": "softmx"}, "activation must be one of 'softmax', 'exp'"),
        ([2], {"prediction_col": ""}, "prediction_col, .* must be names; got ''"),
        ([2], {"probability_col": ["p"]}, "must be names; got .'p'"),
        ([2], {"prediction_col": "x", "feature_cols": ["x"]}, "'x' is a feature column, and transform is to"),
        ([2], {"output_cols": [1]}, "must be names; got 1"),
        ([2], {"probability_col": "p", "output_cols": ["q"]}, "of classes, and output_cols asks for"),
        ([2], {"threshold": 0.1, "raw_outputs": True}, "threshold is of classes, and raw_outputs asks for"),
        ([2], {"raw_outputs": 1}, "raw_outputs must be True or False"),
        ([2], {"threshold": 1.5, "activation": "softmax"}, "must be a number from 0 to 1, .* got 1.5"),
        ([2], {"thresholds": [0, 0], "activation": "softmax"}, "at most one 0; got .0, 0."),
        ([2], {"thresholds": 0.5, "activation": "softmax"}, "thresholds a list of one number"),
        ([2], {"thresholds": [1, 1], "threshold": 0.7, "activation": "softmax"}, "say different things"),
    ],
)
def test_columns_that_do_not_fit_are_refused(shapes: list[Any], given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        outputs(shapes, **given)
