"""How fast does `transform` predict, against Spark ML's predict_batch_udf and against a UDF of one row at a time?

A table of arrays of 50 floats, cached, in a Spark session of this machine; an MLP 50-64-1. Each predicts all rows and
sums them up in Spark, so that nothing is collected. They take turns; medians over the rounds, the first one untimed.
rows/s: more is better. The UDF of a row at a time sees a part of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, FloatType

from benchmarks.parts.ranks import compare_figures
from benchmarks.parts.report import Row
from benchmarks.parts.spark import open_session
from spark_elastic.data.manifest import Column
from spark_elastic.estimators.predictor import TorchPredictor
from spark_elastic.estimators.saving import pack
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.estimators.transformer import FitSummary

WIDTH, BATCH, ONE_BY_ONE = 50, 512, 20  # the last: a part of the rows


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).eval()


def make_batched_udf() -> Callable[..., SparkColumn]:
    weights = net().state_dict()

    def make() -> Callable[[Any], Any]:
        model = net()
        model.load_state_dict(weights)

        def predict(x: Any) -> Any:
            with torch.inference_mode():
                return model(torch.from_numpy(np.ascontiguousarray(x))).numpy()[:, 0]

        return predict

    return predict_batch_udf(make, return_type=FloatType(), batch_size=BATCH, input_tensor_shapes=[[WIDTH]])


def make_row_udf() -> Callable[..., SparkColumn]:
    model = net()  # pickled with the function, once a Python worker

    def predict(x: Any) -> float:
        with torch.inference_mode():
            return float(model(torch.tensor([x])))

    return F.udf(predict, DoubleType())


def predict_all(make: Callable[[], DataFrame], count: int) -> list[float]:
    """[rows/s]"""
    begin = time.perf_counter()
    make().agg(F.sum("prediction")).collect()
    return [count / (time.perf_counter() - begin)]


def measure(rows: int = 1_000_000, rounds: int = 5) -> list[Row]:
    model = ElasticTorchModel(TorchPredictor(pack(net()), (Column("x", "float32", (WIDTH,)),)), FitSummary())
    few = rows // ONE_BY_ONE
    with open_session(2) as spark:
        numbers = F.array(*(F.rand(seed).cast("float") for seed in range(WIDTH)))
        df = spark.range(rows, numPartitions=2).select(numbers.alias("x")).cache()
        part = df.limit(few).cache()
        assert (df.count(), part.count()) == (rows, few)
        by_batch, by_row = make_batched_udf(), make_row_udf()
        contenders = {
            "ours": partial(predict_all, lambda: model.transform(df), rows),
            "predict_batch_udf": partial(
                predict_all, lambda: df.withColumn("prediction", by_batch("x")), rows
            ),
            "a row at a time": partial(predict_all, lambda: part.withColumn("prediction", by_row("x")), few),
        }
        speeds = compare_figures(contenders, rounds, warm_up=1)
    (ours,) = speeds.pop("ours")
    return [Row(f"transform, against {name}", ours, speed, "rows/s") for name, (speed,) in speeds.items()]
