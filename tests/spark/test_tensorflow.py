"""TensorFlow on a real cluster beyond the estimator's own test: the documented script, and folds of the estimator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

import spark_elastic
from spark_elastic import ElasticKerasEstimator
from tests.scenarios import Fault
from tests.sources import ROOT
from tests.spark.stories import ActAtStep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.cluster import StandaloneCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3 with numpy 2
]

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


def model() -> Any:
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
    made.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return made


def test_folds_of_a_pipeline_choose_the_better_rate(spark: SparkSession, tmp_path: Path) -> None:
    """Three slots and workers in pairs, fits in parallel: at most one trains at a time."""
    x = np.random.default_rng(5).normal(size=(60, 2))
    df = spark.createDataFrame([(float(a), float(b), int(a > b)) for a, b in x], "a double, b double, y long")
    how: dict[str, Any] = {"batch_size": 10, "epochs": 2, "num_workers": 2, "verbose": 0}
    columns = {"feature_cols": "x", "label_cols": "y"}
    estimator = ElasticKerasEstimator(model=model(), **columns, store=str(tmp_path), **how)
    tuned = CrossValidator(
        estimator=Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), estimator]),
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.learning_rate, [0.0, 1.0]).build(),
        evaluator=MulticlassClassificationEvaluator(labelCol="y", metricName="logLoss"),
        numFolds=2,
        parallelism=2,
        seed=3,
    ).fit(df)
    untrained, trained = tuned.avgMetrics
    assert trained < untrained
    row = tuned.transform(df).first()
    assert row.prediction == float(np.argmax(row.probability.toArray()))
