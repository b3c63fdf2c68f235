"""What does it cost to write a table in the order of its rows' hash, beside writing it as Spark has it?

    python benchmarks/row_order.py --json benchmarks/results/row_order.json

Three Parquet tables in a warm local session: so many million rows (`--millions`) of eleven numbers, a third as many of
a vector of 50 and a label, and as many as the first of three small integers, nearly all of which are copies of others.
Seconds of `materialize`; both orders take turns, medians over the rounds. A round takes half a minute on two cores.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.parts.report import Row, finish, parser
from spark_elastic.data.store import Store
from spark_elastic.estimators.dataframes.materialize import WriteOptions, materialize

CORES = 2


def make_tables(spark: SparkSession, rows: int) -> dict[str, DataFrame]:
    """Tables by what they hold."""
    all_rows, third = (spark.range(count, numPartitions=4 * CORES) for count in (rows, rows // 3))
    label = (F.col("id") % 2).alias("y")
    vector = array_to_vector(F.array(*(F.rand(seed) for seed in range(50)))).alias("x")
    return {
        f"{rows:,} rows of 11 numbers": all_rows.select(
            *(F.rand(n).alias(f"x{n}") for n in range(10)), label
        ),
        f"{rows // 3:,} rows of a vector of 50": third.select(vector, label),
        f"{rows:,} rows, nearly all copies": all_rows.selectExpr(
            "id % 7 as a", "id % 11 as b", "id % 2 as y"
        ),
    }


def measure(df: DataFrame, folder: str, row_order: str) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as store:
        begin = time.perf_counter()
        materialize(df, df.columns, Store.open(store), WriteOptions(row_order=row_order))
        return time.perf_counter() - begin


def main() -> None:
    made = parser("Seconds to write a table in the order of its rows' hash, beside its own order.")
    made.add_argument("--millions", type=int, default=1)
    made.add_argument("--rounds", type=int, default=3)
    arguments = made.parse_args()
    settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.driver.memory": "3g"}
    spark = SparkSession.builder.master(f"local[{CORES}]").config(map=settings).getOrCreate()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, df in make_tables(spark, arguments.millions * 1_000_000).items():
            path = str(Path(folder) / name.replace(" ", "-").replace(",", ""))
            df.write.parquet(path)
            found: dict[str, list[float]] = {"hash": [], "table": []}
            for _ in range(arguments.rounds + 1):  # the first warms the JVM
                for row_order, seconds in found.items():
                    seconds.append(measure(spark.read.parquet(path), folder, row_order))
            ours, table = (statistics.median(seconds[1:]) for seconds in found.values())
            rows.append(Row(f"{name}: written in the order of their hash", ours, table))
    spark.stop()
    finish("row_order", rows, arguments.json)


if __name__ == "__main__":
    main()
