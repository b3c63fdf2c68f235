"""The Spark session of a benchmark: local, quiet, without a page; and an estimator of a regression on x and y."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pyspark.sql import SparkSession

from spark_elastic import ElasticTorchEstimator


@contextmanager
def open_session(cores: int, **settings: str) -> Iterator[SparkSession]:
    quiet = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", **settings}
    spark = SparkSession.builder.master(f"local[{cores}]").config(map=quiet).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def make_estimator(
    model: torch.nn.Module, batch: int, workers: int, store: str, epochs: int = 1
) -> ElasticTorchEstimator:
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.functional.mse_loss
    sizes = {"batch_size": batch, "num_workers": workers, "epochs": epochs, "verbose": 0}
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    return ElasticTorchEstimator(model=model, optimizer=optimizer, loss=loss, store=store, **columns, **sizes)
