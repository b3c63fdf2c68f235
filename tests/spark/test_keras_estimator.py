"""The Keras estimator on a real cluster, an executor lost in mid-fit: weights, transform, what is saved and loaded.

With a global batch of the whole table an epoch is one step, whatever the order of rows: then Keras alone gives the
weights to compare with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler

from spark_elastic import ElasticKerasEstimator
from spark_elastic.data.manifest import Column
from spark_elastic.estimators.keras_model import ElasticKerasModel, KerasPredictor
from spark_elastic.estimators.transformer import FitSummary
from spark_elastic.training.keras.archive import Archive
from tests.scenarios import Fault
from tests.spark.fits import KillOneExecutor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.cluster import StandaloneCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(480),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3 with numpy 2
]

ROWS, WORKERS, EPOCHS = 48, 2, 40  # each worker and each Python worker of Spark imports TensorFlow


def table(spark: SparkSession) -> DataFrame:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(ROWS, 2)).astype(np.float32)  # as Spark's vectors are kept
    kind = draw.integers(0, 4, ROWS)
    y = (x[:, 0] + kind > 1.5).astype(int)
    rows = [(i, float(x[i, 0]), float(x[i, 1]), int(kind[i]), int(y[i]), 1.0 + i % 3) for i in range(ROWS)]
    return spark.createDataFrame(rows, "id long, a double, b double, kind int, y int, w double")


def make_model() -> Any:
    """Two named inputs, an embedding among them, classes as outputs; float64."""
    kind, x = keras.Input((1,), dtype="int32", name="kind"), keras.Input((2,), name="x")
    coded = keras.layers.Flatten()(keras.layers.Embedding(4, 3)(kind))
    hidden = keras.layers.Dense(6, activation="tanh")(keras.layers.Concatenate()([x, coded]))
    model = keras.Model([kind, x], keras.layers.Dense(2, activation="softmax")(hidden))
    model.compile(
        keras.optimizers.SGD(0.2, momentum=0.9),
        "sparse_categorical_crossentropy",
        weighted_metrics=["accuracy"],
    )
    return model


class SlowSteps(keras.callbacks.Callback):
    """Its steps take their time as long as the file `gate` is not there, so that the training is met in mid-run."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self._gate = gate

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._gate.exists():
            time.sleep(0.5)


@pytest.fixture
def float64() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.mark.scenario("G13")
def test_a_fit_survives_a_lost_executor_and_its_model_is_saved_and_loaded(
    spark: SparkSession, standalone: StandaloneCluster, tmp_path: Path, fault: Fault, float64: None
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    keras.utils.set_random_seed(3)
    model, df = make_model(), table(spark)
    gate = tmp_path / "gate"
    first = [w.copy() for w in model.get_weights()]

    estimator = ElasticKerasEstimator(
        model=model,
        feature_cols=["x", "kind"],
        label_cols="y",
        sample_weight_col="w",
        callbacks=[
            SlowSteps(gate),
            keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="loss"),
        ],
        batch_size=ROWS // WORKERS,
        epochs=EPOCHS,
        num_workers=WORKERS,
        store=str(tmp_path / "store"),
        verbose=0,
        on_progress=KillOneExecutor(standalone, fault, WORKERS, gate, again=False),
        gather_timeout=60.0,
    )
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="x")
    fitted = Pipeline(stages=[assembler, estimator]).fit(df)
    ours = fitted.stages[1]
    assert len(ours.summary.worlds) > 1, "nobody was lost"
    for before, after in zip(first, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after, "fit changed the user's model")

    rows = df.orderBy("id").collect()
    inputs = [np.array([[r.kind] for r in rows]), np.array([[r.a, r.b] for r in rows])]
    labels, weights = np.array([r.y for r in rows]), np.array([r.w for r in rows])
    for _ in range(EPOCHS):
        model.train_on_batch(inputs, labels, sample_weight=weights)
    for got, plain in zip(ours.getModel().get_weights(), model.get_weights(), strict=True):
        assert np.abs(got - plain).max() / np.abs(plain).max() < 1e-9
    assert [epoch["rows"] for epoch in ours.history] == [ROWS] * EPOCHS
    assert ours.history[-1]["loss"] < ours.history[0]["loss"]
    assert "accuracy" in ours.history[0] or "weighted_accuracy" in ours.history[0]
    assert (tmp_path / "best.keras").exists()

    expected = model.predict(inputs, verbose=0)
    out = fitted.transform(df.coalesce(1)).cache()
    for row, probabilities in zip(out.orderBy("id").collect(), expected, strict=True):
        np.testing.assert_allclose(row.probability.toArray(), probabilities, rtol=1e-9)
        assert row.prediction == probabilities.argmax()
    measured = MulticlassClassificationEvaluator(labelCol="y", metricName="accuracy").evaluate(out)
    assert measured == pytest.approx((expected.argmax(1) == labels).mean())

    fitted.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    assert loaded.stages[1].history == ours.history
    again = loaded.transform(df.coalesce(1)).orderBy("id").select("prediction").collect()
    assert again == out.orderBy("id").select("prediction").collect()

    estimator.copy({estimator.on_progress: None}).write().overwrite().save(str(tmp_path / "estimator"))
    kept = ElasticKerasEstimator.load(str(tmp_path / "estimator"))
    assert kept.getBatchSize() == ROWS // WORKERS
    for got, given in zip(kept.getModel().get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, given)


@pytest.mark.faults  # Python workers that import TensorFlow; what the predictor does is a unit's test
def test_a_transformation_is_applied_in_fit_and_transform(spark: SparkSession, tmp_path: Path) -> None:
    def measure_lengths(columns: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.array([[len(image)] for image in columns["image"]])}

    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    predictor = KerasPredictor(
        Archive.of(net), (Column("image", "object"),), cloudpickle.dumps(measure_lengths)
    )
    ElasticKerasModel(predictor, FitSummary()).write().overwrite().save(str(tmp_path / "model"))
    model = ElasticKerasModel.load(str(tmp_path / "model"))
    df = spark.range(4).selectExpr("id", "cast(repeat('a', int(id)) as binary) image")
    assert [row.prediction for row in model.transform(df).orderBy("id").collect()] == [0.0, 1.0, 2.0, 3.0]
