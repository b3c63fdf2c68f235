"""`fit` by each reader while an executor is lost; by petastorm on Spark 3.5, which its environment has.

With a global batch of the whole table an epoch is one step, whatever the order of rows: then plain torch gives the
weights to compare with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler

from spark_elastic import ElasticTorchEstimator
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.training.torch.callbacks import Callback
from tests.component.readers import READERS
from tests.component.torch.job import difference

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.cluster import StandaloneCluster

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.faults]

ROWS, WORKERS, EPOCHS = 48, 3, 40


class SlowSteps(Callback):
    """Takes its time, so that the training is met in mid-run."""

    def on_step_begin(self, training: Any, epoch: int, step: int) -> None:
        time.sleep(0.05)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("reader", READERS)
def test_p1_p2_hold_with_every_reader_after_a_lost_executor(
    reader: str, spark: SparkSession, standalone: StandaloneCluster, tmp_path: Path
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    x = torch.randn(ROWS, 2).double()  # vectors are trained on as float32
    y = x[:, :1] * 2 - x[:, 1:]
    rows = [(*map(float, pair), float(label)) for pair, label in zip(x, y, strict=True)]
    table = spark.createDataFrame(rows, "a double, b double, y double")
    df = VectorAssembler(inputCols=["a", "b"], outputCol="x").transform(table)
    killed: list[int] = []

    def follow(numbers: Mapping[str, Any]) -> None:
        if numbers["epoch"] >= 10 and not killed:
            killed.append(standalone.executor_pids()[0])
            standalone.kill_executor(killed[0])

    fitted = ElasticTorchEstimator(
        model=net,
        optimizer=sgd,
        loss=torch.nn.MSELoss(),
        feature_cols="x",
        label_cols="y",
        label_shapes=[(1,)],
        callbacks=[SlowSteps()],
        batch_size=ROWS // WORKERS,
        epochs=EPOCHS,
        num_workers=WORKERS,
        store=str(tmp_path / "store"),
        reader=reader,
        verbose=0,
        on_progress=follow,
    ).fit(df)
    assert killed
    assert len(fitted.summary.worlds) > 1, "nobody was lost"
    assert fitted.summary.rows_per_epoch == [ROWS] * EPOCHS
    optimizer = sgd(net.parameters())
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    assert difference(fitted.model.state_dict(), net.state_dict()) < 1e-9
    fitted.write().overwrite().save(str(tmp_path / "model"))
    out, again = fitted.transform(df), ElasticTorchModel.load(str(tmp_path / "model")).transform(df)
    assert again.collect() == out.collect()
    assert RegressionEvaluator(labelCol="y").evaluate(out) < 1.0
