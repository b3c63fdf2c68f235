"""What does it cost to write a table in the order of its rows' hash, beside writing it as Spark has it?

Three Parquet tables in a warm local session: so many million rows (`millions`) of eleven numbers, a third as many of
a vector of 50 and a label, and as many as the first of three small integers, nearly all of which are copies of others.
Seconds of `materialize`; both orders take turns, medians over the rounds. A round takes half a minute on two cores.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial

from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.parts.ranks import compare_figures
from benchmarks.parts.report import Row
from benchmarks.parts.spark import open_session
from spark_elastic.data.store import Store
from spark_elastic.estimators.dataframes.materialize import WriteOptions, materialize

CORES = 2


def make_tables(spark: SparkSession, rows: int) -> dict[str, DataFrame]:
    """Tables by what they hold."""
    all_rows, third = (spark.range(count, numPartitions=4 * CORES) for count in (rows, rows // 3))
    numbers = [F.rand(n).alias(f"x{n}") for n in range(10)]
    label = (F.col("id") % 2).alias("y")
    vector = array_to_vector(F.array(*(F.rand(seed) for seed in range(50)))).alias("x")
    return {
        f"{rows:,} rows of 11 numbers": all_rows.select(*numbers, label),
        f"{rows // 3:,} rows of a vector of 50": third.select(vector, label),
        f"{rows:,} rows, nearly all copies": all_rows.selectExpr(*(f"id % {n} as x{n}" for n in (7, 11, 2))),
    }


def write_table(df: DataFrame, folder: str, row_order: str) -> list[float]:
    """[seconds]"""
    with tempfile.TemporaryDirectory(dir=folder) as store:
        begin = time.perf_counter()
        materialize(df, df.columns, Store.open(store), WriteOptions(row_order=row_order))
        return [time.perf_counter() - begin]


def measure(millions: float = 1, rounds: int = 3) -> list[Row]:
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_session(CORES, **{"spark.driver.memory": "3g"}) as spark,
    ):
        for number, (name, df) in enumerate(make_tables(spark, int(millions * 1_000_000)).items()):
            df.write.parquet(f"{folder}/{number}")
            table = spark.read.parquet(f"{folder}/{number}")
            orders = {order: partial(write_table, table, folder, order) for order in ("hash", "table")}
            (ours,), (own,) = compare_figures(orders, rounds, warm_up=1).values()  # the first warms the JVM
            rows.append(Row(f"{name}: written in the order of their hash", ours, own))
    return rows
