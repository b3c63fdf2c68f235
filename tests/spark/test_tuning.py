"""The estimator among Spark ML's own parts: grids, folds, evaluators, saved estimators, validation and hooks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import DataFrame, SparkSession

from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.training.torch.callbacks import BestWeights, EarlyStopping

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 60


def table(spark: SparkSession) -> DataFrame:
    """Two features, the sign of their difference as class, their sum as a number, and which rows validate."""
    x = np.random.default_rng(5).normal(size=(ROWS, 2))
    rows = [(float(a), float(b), int(a > b), float(a + b), i % 4 == 0) for i, (a, b) in enumerate(x)]
    return spark.createDataFrame(rows, "a double, b double, y long, z double, v boolean")


def classifier(store: Path, **changes: Any) -> ElasticTorchEstimator:
    torch.manual_seed(1)
    values: dict[str, Any] = {
        "model": torch.nn.Linear(2, 2).double(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.0),
        "loss": torch.nn.CrossEntropyLoss(),
        "feature_cols": "x",
        "label_cols": "y",
        "batch_size": 16,
        "epochs": 2,
        "num_workers": 2,
        "store": str(store),
        "verbose": 0,
    }
    return ElasticTorchEstimator(**(values | changes))


def assemble(df: DataFrame) -> DataFrame:
    return VectorAssembler(inputCols=["a", "b"], outputCol="x").transform(df)


def test_fits_in_parallel_end_each_with_its_own_metrics(spark: SparkSession, tmp_path: Path) -> None:
    """Three slots and workers in pairs: at most one fit trains at a time. One does not move from its first weights."""
    estimator = classifier(tmp_path)
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.0, 1.0]).build()
    evaluator = MulticlassClassificationEvaluator(labelCol="y", metricName="accuracy")
    tuned = TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=evaluator,
        parallelism=3,
        collectSubModels=True,
        seed=3,
    ).fit(assemble(table(spark)))
    first, better = tuned.validationMetrics
    assert first < better
    first_weights = estimator.getModel().weight
    assert [torch.equal(each.model.weight, first_weights) for each in tuned.subModels] == [True, False]


@pytest.mark.faults  # takes a minute; the folds of every build are those above
def test_a_cross_validated_pipeline_of_a_saved_estimator(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "estimator")
    classifier(tmp_path / "store", epochs=1).write().overwrite().save(path)
    estimator = ElasticTorchEstimator.load(path)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="x")
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [1.0]).build()
    folds = CrossValidator(
        estimator=Pipeline(stages=[assembler, estimator]),
        estimatorParamMaps=grid,
        evaluator=MulticlassClassificationEvaluator(labelCol="y", metricName="logLoss"),
        numFolds=2,
        parallelism=2,
    ).fit(table(spark))
    row = folds.transform(table(spark)).first()
    assert row.prediction == float(np.argmax(row.probability.toArray()))
    assert folds.avgMetrics[0] > 0
    folds.write().overwrite().save(str(tmp_path / "folds"))
    back = CrossValidatorModel.load(str(tmp_path / "folds"))
    assert back.avgMetrics == folds.avgMetrics
    assert back.getEstimator().getStages()[1].getOrDefault("epochs") == 1
    assert back.getEstimatorParamMaps()[0][estimator.learning_rate] == 1.0
    assert back.transform(table(spark)).first() == row


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 1).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)[:, 0]


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    guess = output.argmax(1) if output.ndim == 2 else output.round()
    return (guess == label).double().mean()


def test_a_fit_with_several_losses_validation_metrics_and_callbacks_agrees_with_transform(
    spark: SparkSession, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    model = classifier(
        tmp_path,
        model=lambda: Two(),  # noqa: PLW0108 - a factory, where the class itself is refused
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2),
        loss=[torch.nn.CrossEntropyLoss(), torch.nn.MSELoss()],
        loss_weights=[1.0, 0.5],
        label_cols=["y", "z"],
        validation="v",
        metrics=[accuracy],
        callbacks=[BestWeights(), EarlyStopping(patience=1, min_delta=9.0)],
        epochs=5,
        gather_timeout=60.0,
    ).fit(assemble(table(spark)))
    history = model.history
    assert len(history) == 2, "the first epoch is the best one for EarlyStopping, the second ends it"
    assert [(epoch["rows"], epoch["val_rows"]) for epoch in history] == [(45, 15)] * 2
    whole = history[1]["val_loss_y"] + 0.5 * history[1]["val_loss_z"]
    assert history[1]["val_loss"] == pytest.approx(whole)
    out = model.transform(assemble(table(spark))).where("v").collect()
    right = np.mean([np.argmax(row.y__output) == row.y for row in out])
    assert history[1]["val_accuracy_y"] == pytest.approx(right), "BestWeights kept the second epoch's"
    assert [row.val_rows for row in model.history_frame().collect()] == [15, 15]
    assert [row["size"] for row in model.worlds_frame().collect()] == [2]
