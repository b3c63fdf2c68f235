"""Keras on a real cluster, through the loss of an executor: the estimator and its model, and the documented script.

With a global batch of the whole table an epoch is one step, whatever the order of rows: then Keras alone gives the
weights to compare with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import DataFrame, SparkSession

import spark_elastic
from spark_elastic import ElasticKerasEstimator
from tests.scenarios import Fault
from tests.sources import ROOT
from tests.spark.cluster import StandaloneCluster
from tests.spark.fits import KillOneExecutor
from tests.spark.stories import ActAtStep

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
    optimizer, loss = keras.optimizers.SGD(0.2, momentum=0.9), "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])
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


BATCHES = 60


def script(path: str, gate: str) -> dict[str, Any]:
    """examples/tf_elastic.py, which from batch 10 on waits for a file: until the executor is dead."""
    import os
    import runpy
    import sys
    import time

    import spark_elastic.tensorflow as hvd

    class GatedState(hvd.elastic.TensorFlowKerasState):
        def commit(self) -> None:
            while self.batch == 10 and not os.path.exists(gate):
                time.sleep(0.05)
            super().commit()

    hvd.elastic.TensorFlowKerasState = GatedState
    sys.argv = [path, "60"]
    names = runpy.run_path(path)
    return {
        "weights": names["model"].get_weights(),
        "rate": float(names["optimizer"].learning_rate) / names["RATE"],
        "batch": names["state"].batch,
        "size": hvd.size(),
    }


@pytest.mark.native
@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.scenario("S4")
def test_the_documented_script_loses_an_executor(
    spark: SparkSession, standalone: StandaloneCluster, tmp_path: Path, fault: Fault
) -> None:
    gate = tmp_path / "gate"

    def kill_executor() -> None:
        fault(standalone.kill_executor, standalone.executor_pids()[0])
        gate.touch()

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    stream = ActAtStep(kill_executor, "batch 10: loss")
    arguments = str(ROOT / "examples" / "tf_elastic.py"), str(gate)
    how: dict[str, Any] = {"num_proc": 3, "min_np": 1, "env": {"TF_CPP_MIN_LOG_LEVEL": "2"}}
    results = spark_elastic.run(script, arguments, spark=spark, stdout=stream, **how)
    stream.thread.join()
    told = stream.getvalue()
    assert told.count("world of ") >= 2, told
    assert {result["batch"] for result in results} == {BATCHES}
    assert {result["size"] for result in results} == {len(results)}
    assert [result["rate"] for result in results] == pytest.approx([float(len(results))] * len(results))
    for result in results:
        assert all(map(np.array_equal, result["weights"], results[0]["weights"]))
    losses = [line.split("loss ")[1].split() for line in told.splitlines() if ": loss" in line]
    assert float(losses[-1][0]) < float(losses[0][0])
