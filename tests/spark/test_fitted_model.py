"""The fitted model as a Transformer: predictions as the module's own, saved and loaded as Spark ML does."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pyspark.errors import AnalysisException
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators import saving
from spark_elastic.estimators.predictor import ModuleWithTransformation, TorchPredictor
from spark_elastic.estimators.saving import pack
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.estimators.transformer import FitSummary, WorldRecord, try_shapes

pytestmark = pytest.mark.spark
EPOCH = {"epoch": 0, "loss": 1.5, "rows": 7}
SUMMARY = FitSummary("run", (EPOCH,), (WorldRecord(0.0, 3, "start"),), 2.0, 7, "ab")
ROWS = 40


def make_model(module: torch.nn.Module, *columns: Column) -> ElasticTorchModel:
    return ElasticTorchModel(TorchPredictor(pack(module), columns), SUMMARY)


def linear(width: int) -> tuple[torch.nn.Module, ElasticTorchModel]:
    module = torch.nn.Linear(2, width)
    return module, make_model(module, Column("x", "float32", (2,)))


def table(spark: SparkSession) -> DataFrame:
    values = np.random.default_rng(3).normal(size=(ROWS, 2)).astype("float32")
    rows = [(i, v.tolist(), Vectors.sparse(2, enumerate(v.tolist()))) for i, v in enumerate(values)]
    schema = T.StructType().add("id", T.IntegerType()).add("x", T.ArrayType(T.FloatType()))
    return spark.createDataFrame(rows, schema.add("v", VectorUDT()))


def predict(module: torch.nn.Module, rows: list[T.Row]) -> np.ndarray:
    with torch.no_grad():
        return module(torch.tensor([row.x for row in rows])).numpy()


def test_one_number_is_a_double_and_other_columns_stay(spark: SparkSession) -> None:
    module, model = linear(1)
    out = model.transform(table(spark))
    assert out.schema["prediction"].dataType == T.DoubleType()
    assert out.columns == ["id", "x", "v", "prediction"]
    rows = out.orderBy("id").collect()
    assert [row.id for row in rows] == list(range(ROWS))
    found = [row.prediction for row in rows]
    np.testing.assert_allclose(found, predict(module, rows)[:, 0], rtol=1e-5, atol=1e-6)


def test_several_numbers_are_an_array_and_vectors_go_in_as_arrays_do(spark: SparkSession) -> None:
    module = torch.nn.Linear(2, 3)
    model = make_model(module, Column("v", "float32", (2,))).setPredictionCol("scores")
    rows = model.transform(table(spark)).collect()
    np.testing.assert_allclose([row.scores for row in rows], predict(module, rows), rtol=1e-5, atol=1e-6)


def test_a_row_of_nan_predicts_nan_if_it_is_kept_and_the_others_stay(spark: SparkSession) -> None:
    model = linear(3)[1].setMissing({"nans": "keep"})
    df = table(spark).selectExpr("id", "if(id = 7, array(float('nan'), float(1)), x) as x")
    for row in model.transform(df).collect():
        assert np.isnan(row.prediction).all() == np.isnan(row.prediction).any() == (row.id == 7)
    for row in model.setActivation("softmax").transform(df).collect():
        values = [row.prediction, *row.probability.toArray(), *row.rawPrediction.toArray()]
        assert np.isnan(values).all() == np.isnan(values).any() == (row.id == 7)


def test_missing_values_are_those_of_training(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    nan, null = "if(id = 7, array(float('nan'), float(1)), x) as x", "if(id = 9, null, v) as v"
    df = table(spark).selectExpr("id", nan, null)
    two = ModuleWithTransformation(torch.nn.Bilinear(2, 2, 1), dict)
    model = make_model(two, Column("x", "float32", (2,)), Column("v", "float32", (2,)))
    with caplog.at_level("WARNING", "spark_elastic"):
        kept = model.setMissing("drop").transform(df.repartition(1)).select("id", "prediction").collect()
    assert {row.id for row in kept} == set(range(ROWS)) - {7, 9}
    assert not any(np.isnan(row.prediction) for row in kept)
    (line,) = caplog.messages
    assert line == f"transform left out 2 of {ROWS} rows (NaN in 'x': 1, nulls in 'v': 1) of a task"


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_are_those_of_logistic_regression(spark: SparkSession, classes: int) -> None:
    """The same weights give the same columns, and the same numbers of Spark's evaluators."""
    df = table(spark).selectExpr("id", "v", f"double((id % 5 + int(x[0] > x[1])) % {classes}) as y")
    given = {"threshold": 0.6} if classes == 2 else {"thresholds": [0.2, 0.5, 0.3]}
    theirs = LogisticRegression(featuresCol="v", labelCol="y", maxIter=5, **given).fit(df)
    weights, biases = theirs.coefficientMatrix.toArray(), theirs.interceptVector.toArray()
    models = {"softmax": (weights, biases)}
    if classes == 2:  # one logit; and two, at a level of their own in each row
        level = np.array([[2.0, 3.0]])
        models["sigmoid"] = models["softmax"]
        models["softmax"] = np.concatenate([level, weights + level]), np.array([1.0, 1.0 + biases[0]])
    expected = theirs.transform(df).orderBy("id")
    for activation, (weight, bias) in models.items():
        layer = torch.nn.Linear(2, len(weight)).double()
        layer.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
        ours = make_model(layer, Column("v", "float32", (2,))).setActivation(activation)
        predicted = ours.copy({getattr(ours, name): value for name, value in given.items()}).transform(df)
        assert predicted.dtypes == expected.dtypes
        for got, row in zip(predicted.orderBy("id").collect(), expected.collect(), strict=True):
            assert got.prediction == row.prediction
            np.testing.assert_allclose(got.probability.toArray(), row.probability.toArray(), rtol=1e-6)
            np.testing.assert_allclose(got.rawPrediction.toArray(), row.rawPrediction.toArray(), rtol=1e-6)
        evaluators: list[Any] = [MulticlassClassificationEvaluator(labelCol="y", metricName="logLoss")]
        if classes == 2:
            evaluators.append(BinaryClassificationEvaluator(labelCol="y"))
        for evaluator in evaluators:
            assert evaluator.evaluate(predicted) == pytest.approx(evaluator.evaluate(expected))


def test_a_model_is_shipped_once_for_all_of_its_transforms(spark: SparkSession) -> None:
    _, model = linear(1)
    folder = Path(spark.sparkContext._temp_dir)  # where Spark keeps each broadcast until the session ends
    before = set(folder.iterdir())
    for each in (model, model.copy(), model):
        assert each.transform(table(spark)).where("prediction is not null").count() == ROWS
    assert len(set(folder.iterdir()) - before) == 1


def test_an_empty_table_has_no_predictions(spark: SparkSession) -> None:
    assert linear(2)[1].transform(table(spark).where("id < 0")).collect() == []


def test_a_saved_and_loaded_model_predicts_the_same(spark: SparkSession, tmp_path: Path) -> None:
    module, model = linear(2)
    model.setPredictionCol("scores")
    path = str(tmp_path / "m[o]del")  # which Spark's readers take for a pattern
    model.save(path)
    with pytest.raises(AnalysisException, match="already exists"):
        model.save(path)
    with pytest.raises(InvalidInput, match=r"save\(\) takes the path or url of a new folder; got None"):
        model.save(cast("Any", None))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"file/m cannot be written, with \S*Exception: .*: give a new"):
        model.save(str(tmp_path / "file" / "m"))
    model.write().overwrite().save(path)
    back = ElasticTorchModel.load(path)
    assert back.uid == model.uid
    assert back.summary == SUMMARY
    assert back.history == [{"epoch": 0, "loss": 1.5, "rows": 7}]
    assert all(torch.equal(a, b) for a, b in zip(back.model.parameters(), module.parameters(), strict=True))
    df = table(spark)
    assert back.transform(df).collect() == model.transform(df).collect()
    with pytest.raises(InvalidInput, match=r"ElasticTorchModel saved what is at .*: call ElasticTorchMo"):
        ElasticTorchEstimator.load(path)
    shutil.rmtree(tmp_path / "m[o]del" / "data")
    lost = str(tmp_path / "none")
    for gone, says in (path, r"m\[o\]del cannot be loaded as .*: give the whole"), (lost, "none .*NOT_FOUND"):
        with pytest.raises(StoreError, match=says):
            ElasticTorchModel.load(gone)


def test_a_model_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"class": "spark_elastic.estimators.torch_model.ElasticTorchModel", "format": 99}
    monkeypatch.setattr(saving, "DefaultParamsReader", SimpleNamespace(loadMetadata=lambda *given: saved))
    session: Any = SimpleNamespace(sparkContext=None)
    with pytest.raises(StoreError, match="has format 99, and this release reads 2"):
        saving.read_metadata(session, "there", ElasticTorchModel)


def test_the_module_handed_out_is_a_copy() -> None:
    _, model = linear(1)
    with torch.no_grad():
        model.model.weight.zero_()
    assert model.getModel().weight.abs().sum() > 0
    assert not model.getModel().training


def test_times_without_a_zone_come_as_in_training_whenever_they_are(spark: SparkSession) -> None:
    """Pandas holds 1677 to 2262 only, and 02:30 of that day is no time in New York."""

    def read_micros(columns: dict[str, Any]) -> dict[str, Any]:
        return {"time": columns["time"].astype("int64").astype("float64")[:, None]}

    texts = "1500-01-01 00:00:00", "2024-03-10 02:30:00.123456", "3000-12-31 23:59:59"
    module = ModuleWithTransformation(torch.nn.Identity(), read_micros)
    model = make_model(module, Column("time", "datetime64[us]"))
    df = spark.createDataFrame([(text,) for text in texts], "text string")
    df = df.selectExpr("cast(text as timestamp_ntz) time")
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        got = [row.prediction for row in model.transform(df).collect()]
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    expected = [np.datetime64(text, "us").astype("int64").item() for text in texts]
    assert sorted(got) == pytest.approx(expected, rel=5e-7)


def test_columns_of_every_type_that_fits_come_as_those_of_training(spark: SparkSession) -> None:
    kinds = {
        "i": ("int(id)", Column("i", "int32")),
        "long": ("id", Column("long", "int32")),
        "odd": ("id % 2 = 1", Column("odd", "int64")),
        "a.b`c": ("double(id)", Column("a.b`c", "float32", (1,))),
        "price": ("cast(id as decimal(10, 2))", Column("price", "float64")),
        "prices": ("array(array(cast(id as decimal(10, 2))))", Column("prices", "float64", (1, 1))),
        "days": ("array(date_add(date'1970-01-01', int(id)))", Column("days", "datetime64[D]", (1,))),
        "moments": ("array(array(timestamp_micros(id)))", Column("moments", "datetime64[us]", (1, 1))),
    }

    def numbers(columns: dict[str, Any]) -> dict[str, Any]:
        assert all(columns[name].dtype == column.dtype for name, (_, column) in kinds.items())
        whole = {name: values.astype("int64") for name, values in columns.items()}
        return {name: values.reshape(len(values), 1).astype("float64") for name, values in whole.items()}

    class Sum(torch.nn.Module):
        def forward(self, *parts: Any) -> Any:
            return sum(parts)

    model = make_model(ModuleWithTransformation(Sum(), numbers), *(column for _, column in kinds.values()))
    df = spark.range(5).select(*(F.expr(text).alias(name) for name, (text, _) in kinds.items()))
    got = [row.prediction for row in model.transform(df).orderBy("i").collect()]
    assert got == [7.0 * i + i % 2 for i in range(5)]


def test_a_transformation_is_applied_to_rows_of_transform(spark: SparkSession, tmp_path: Path) -> None:
    """Bytes, a day, a moment and a ragged array come as in training, whatever the session's time zone."""

    def numbers(columns: dict[str, Any]) -> dict[str, Any]:
        made = {"image": [len(image) for image in columns["image"]]}
        made |= {"tokens": [tokens.sum(dtype="int16") for tokens in columns["tokens"]]}
        made |= {name: columns[name].astype("int64") for name in ("day", "moment")}
        return {name: np.array(values, "float64")[:, None] for name, values in made.items()}

    class Sum(torch.nn.Module):
        def forward(self, image: Any, day: Any, moment: Any, tokens: Any) -> Any:
            return image * 100 + day * 10 + moment / 1e6 + tokens * 1000

    columns = (
        Column("image", "object"),
        Column("day", "datetime64[D]"),
        Column("moment", "datetime64[us]"),
        Column("tokens", "object", ragged="int16"),
    )
    model = make_model(ModuleWithTransformation(Sum(), numbers), *columns).setMissing("drop")
    df = spark.range(5).selectExpr(
        "if(id = 4, null, cast(repeat('a', int(id)) as binary)) image",
        "date_add(date'1970-01-01', int(id)) day",
        "timestamp_seconds(id) moment",
        "array_repeat(id, int(id)) tokens",
    )
    got = [row.prediction for row in model.transform(df).orderBy("day").collect()]
    assert got == pytest.approx([111.0 * i + 1000 * i * i for i in range(4)])
    with pytest.raises(InvalidInput, match="'tokens' is bigint; the model was trained on arrays of int16"):
        model.transform(df.drop("tokens").selectExpr("*", "1L tokens"))
    with pytest.raises(InvalidInput, match="the table has no rows"):
        model.transform(df.limit(0))
    row = list(df.orderBy("day").first() or ())
    known = ElasticTorchModel(model._predictor, SUMMARY, try_shapes(model._predictor, row))
    path = str(tmp_path / "model")
    known.save(path)
    empty = ElasticTorchModel.load(path).transform(df.limit(0))
    assert (empty.count(), empty.schema["prediction"].dataType) == (0, T.DoubleType())
