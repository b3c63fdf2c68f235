"""How fast does `transform` predict, against Spark ML's predict_batch_udf and against a UDF of one row at a time?

    python benchmarks/transform.py --json benchmarks/results/transform.json

A table of arrays of 50 floats, cached, in a Spark session of this machine; an MLP 50-64-1. Each predicts all rows and
sums them up in Spark, so that nothing is collected. They take turns; medians over the rounds, the first one untimed.
rows/s: more is better. The UDF of a row at a time sees a part of the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, FloatType

from benchmarks.parts.report import Row, finish, parser
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


def seconds(df: DataFrame) -> float:
    begin = time.perf_counter()
    df.agg(F.sum("prediction")).collect()
    return time.perf_counter() - begin


def measure(df: DataFrame, rows: int, rounds: int) -> list[Row]:
    model = ElasticTorchModel(TorchPredictor(pack(net()), (Column("x", "float32", (WIDTH,)),)), FitSummary())
    by_batch, by_row = make_batched_udf(), make_row_udf()
    few = df.limit(rows // ONE_BY_ONE).cache()
    few.count()
    cases: dict[str, tuple[int, Callable[[], DataFrame]]] = {
        "ours": (rows, lambda: model.transform(df)),
        "predict_batch_udf": (rows, lambda: df.withColumn("prediction", by_batch("x"))),
        "a row at a time": (rows // ONE_BY_ONE, lambda: few.withColumn("prediction", by_row("x"))),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, (count, made) in cases.items():
            found[name].append(count / seconds(made()))
    speeds = {name: statistics.median(each[1:]) for name, each in found.items()}
    ours = speeds.pop("ours")
    return [Row(f"transform, against {name}", ours, speed, "rows/s") for name, speed in speeds.items()]


def main() -> None:
    made = parser("Rows per second of transform beside other ways to predict in Spark.")
    made.add_argument("--rows", type=int, default=1_000_000)
    made.add_argument("--rounds", type=int, default=5)
    arguments = made.parse_args()
    settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    numbers = F.array(*(F.rand(seed).cast("float") for seed in range(WIDTH)))
    df = spark.range(arguments.rows, numPartitions=2).select(numbers.alias("x")).cache()
    df.count()
    rows = measure(df, arguments.rows, arguments.rounds)
    spark.stop()
    finish("transform", rows, arguments.json)


if __name__ == "__main__":
    main()
