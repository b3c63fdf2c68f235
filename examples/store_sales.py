"""Forecast the sales of stores with a Keras model of entity embeddings, while an executor is killed.

    python examples/store_sales.py          # on an embedded cluster of three executors on this machine
    spark-submit examples/store_sales.py    # on the session's own cluster

The table has the shape of the well-known forecasting task (stores, dates, promotions, holidays, weather, competitors),
but is made by `make_sales`. Spark SQL turns it into features; categories are embedded, numbers go in as a vector. The
model learns the logarithm of sales relative to the largest; it is judged by the root mean square percentage error of
the sales themselves, on the last weeks. The last line is the verdict as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WORKERS = 3
HELD_OUT_DAYS = 28
STORE_TYPES, ASSORTMENTS, STATES, HOLIDAYS, EVENTS = 4, 3, 12, 4, 6
# Column -> (how many values it has at most, how many numbers stand for one).
CATEGORIES = {
    "store": (2000, 10),
    "day_of_week": (8, 4),
    "year": (8, 2),
    "month": (13, 6),
    "day": (32, 8),
    "week": (54, 10),
    "store_type": (STORE_TYPES, 2),
    "assortment": (ASSORTMENTS, 2),
    "state": (STATES, 6),
    "state_holiday": (HOLIDAYS, 2),
    "events": (EVENTS, 3),
    "promo": (2, 1),
    "school_holiday": (2, 1),
    "promo_tomorrow": (2, 1),
    "holiday_tomorrow": (2, 1),
}
NUMBERS = (
    "competition_distance",
    "competition_months",
    "promo_weeks",
    "max_temperature",
    "mean_temperature",
    "humidity",
    "wind",
    "cloud_cover",
    "trend",
    "days_since_promo",
    "days_until_promo",
    "promo_days_of_week",
    "store_mean_sales",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", type=int, default=40)
    parser.add_argument("--days", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128, help="rows per worker")
    parser.add_argument("--no-kill", action="store_true", help="leave all executors alone")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*pandas.*", category=FutureWarning)  # pyspark's own
    from pyspark.sql import SparkSession

    # spark-submit starts this script with a gateway to its own JVM; plain python brings its own cluster.
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        embed_cluster()
    spark = SparkSession.builder.appName("store-sales").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # the killed executor would fill the screen
    try:
        with tempfile.TemporaryDirectory(prefix="store-sales-") as store:
            verdict = run(spark, store, options)
    finally:
        spark.stop()
    print(json.dumps(verdict), flush=True)


def embed_cluster() -> None:
    """Settings of a cluster inside this machine: three executors, each a JVM of one core and 1 GiB."""
    settings = ["spark.ui.enabled=false", "spark.ui.showConsoleProgress=false", "spark.driver.memory=1g"]
    words = [f"--conf {setting}" for setting in [*settings, "spark.sql.shuffle.partitions=6"]]
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        f"--master local-cluster[{WORKERS},1,1024] {' '.join(words)} pyspark-shell"
    )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def run(spark: SparkSession, store: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make the table, train, kill, predict, judge."""
    from spark_elastic import ElasticKerasEstimator

    sales, stores, weather = make_sales(spark, options.stores, options.days)
    features = engineer_features(spark, sales, stores, weather).cache()
    largest = features.selectExpr("max(sales) as top").head()["top"]
    log_top = math.log1p(largest)
    rows = features.selectExpr("*", f"log1p(sales) / {log_top} as target").cache()
    last = options.days - HELD_OUT_DAYS
    train, test = rows.where(f"number < {last} and sales > 0"), rows.where(f"number >= {last} and sales > 0")
    keras.utils.set_random_seed(7)
    attack = None if options.no_kill else Attack(spark.sparkContext.applicationId)
    estimator = ElasticKerasEstimator(
        model=make_model(),
        optimizer=keras.optimizers.Adam(2e-3),
        loss="mae",
        metrics=[ExpRmspe(log_top)],
        custom_objects={"ExpRmspe": ExpRmspe},
        feature_cols=[*CATEGORIES, "numbers"],
        label_cols="target",
        validation="held_out",
        batch_size=options.batch_size,
        epochs=options.epochs,
        num_workers=WORKERS,
        store=store,
        on_progress=attack,
        callbacks=[keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2)],
    )
    model = estimator.fit(assemble_vector(train.withColumn("held_out", train.number >= last - HELD_OUT_DAYS)))
    predicted = model.transform(assemble_vector(test)).selectExpr(
        "store", "date", "sales", f"expm1(prediction * {log_top}) as forecast"
    )
    predicted.orderBy("store", "date").show(5)
    error = predicted.selectExpr("sqrt(avg(power((sales - forecast) / sales, 2))) as e").head()["e"]
    for epoch in model.history:
        print(
            f"epoch {epoch['epoch'] + 1:2}  rows {epoch['rows']}  loss {epoch['loss']:.4f}  "
            f"exp_rmspe {epoch['exp_rmspe']:.4f}  validation {epoch['val_exp_rmspe']:.4f}"
        )
    return {
        "rmspe": round(error, 4),
        "rows_trained": [epoch["rows"] for epoch in model.history],
        "worlds": [world.size for world in model.summary.worlds],
        "killed": attack is not None and attack.killed,
    }


def make_sales(spark: SparkSession, stores: int, days: int) -> tuple[DataFrame, DataFrame, DataFrame]:
    """(sales by store and day, stores, weather by state and day): made up, the same each time."""
    draw = np.random.default_rng(11)
    first = date(2024, 1, 1)
    about = [
        (s, int(draw.integers(STORE_TYPES)), int(draw.integers(ASSORTMENTS)), int(draw.integers(STATES)),
         float(draw.gamma(2.0, 2500.0)), int(draw.integers(0, 60)), float(draw.uniform(3000, 9000)))
        for s in range(1, stores + 1)
    ]  # fmt: skip
    sky = []
    for state in range(STATES):
        for number in range(days):
            season = -math.cos(2 * math.pi * number / 365)
            mean = 10 + 9 * season + draw.normal(0, 3)
            sky.append(
                (state, number, mean + 4, mean, float(draw.uniform(40, 95)), float(draw.gamma(2, 6)),
                 float(draw.uniform(0, 8)), int(draw.integers(EVENTS)), 50 + 20 * season)
            )  # fmt: skip
    sold = []
    for store, kind, assortment, _, distance, _, usual in about:
        for number in range(days):
            day = first + timedelta(number)
            promo = int((number // 7 + store) % 3 == 0 and day.weekday() < 5)
            holiday = int(draw.integers(1, HOLIDAYS)) if draw.random() < 0.02 else 0
            school = int(day.month in (7, 8) or draw.random() < 0.05)
            week = (1.25, 1.0, 0.95, 0.95, 1.05, 1.1, 0.0)[day.weekday()]
            factor = week * (1 + 0.35 * promo) * (1 + 0.06 * school) * (1 + 0.1 * assortment + 0.05 * kind)
            factor *= 1 + 0.15 * math.sin(2 * math.pi * (number % 365) / 365) - min(0.1, 300 / distance)
            amount = 0 if holiday else usual * factor * math.exp(draw.normal(0, 0.06))
            sold.append((store, number, day, round(amount), promo, holiday, school))
    return (
        spark.createDataFrame(
            sold,
            "store int, number int, date date, sales int, promo int, state_holiday int, school_holiday int",
        ),
        spark.createDataFrame(
            about,
            "store int, store_type int, assortment int, state int, competition_distance double, "
            "competition_months int, usual double",
        ),
        spark.createDataFrame(
            sky,
            "state int, number int, max_temperature double, mean_temperature double, humidity double, "
            "wind double, cloud_cover double, events int, trend double",
        ),
    )


def engineer_features(
    spark: SparkSession, sales: DataFrame, stores: DataFrame, weather: DataFrame
) -> DataFrame:
    """Everything that the model is told of a store's day."""
    for name, table in (("sales", sales), ("stores", stores), ("weather", weather)):
        table.createOrReplaceTempView(name)
    days = "partition by s.store order by s.number"
    return spark.sql(f"""
        select s.store, s.number, s.date, s.sales, s.promo, s.state_holiday, s.school_holiday,
               dayofweek(s.date) as day_of_week, year(s.date) - 2024 as year, month(s.date) as month,
               day(s.date) as day, weekofyear(s.date) as week,
               t.store_type, t.assortment, t.state, w.events,
               coalesce(lead(s.promo) over store_days, 0) as promo_tomorrow,
               cast(coalesce(lead(s.state_holiday) over store_days, 0) > 0 as int) as holiday_tomorrow,
               log1p(t.competition_distance) as competition_distance,
               t.competition_months + s.number / 30 as competition_months,
               sum(s.promo) over ({days} rows between 27 preceding and current row) / 7 as promo_weeks,
               s.number - coalesce(max(if(s.promo = 1, s.number, null)) over
                   ({days} rows between unbounded preceding and current row), s.number) as days_since_promo,
               coalesce(min(if(s.promo = 1, s.number, null)) over
                   ({days} rows between current row and unbounded following), s.number) - s.number
                   as days_until_promo,
               sum(s.promo) over ({days} rows between 6 preceding and current row) as promo_days_of_week,
               w.max_temperature, w.mean_temperature, w.humidity, w.wind, w.cloud_cover, w.trend,
               log1p(avg(s.sales) over ({days} rows between 35 preceding and 29 preceding)) as mean_before
        from sales s join stores t on s.store = t.store
                     join weather w on w.state = t.state and w.number = s.number
        window store_days as ({days})
    """).selectExpr("*", "coalesce(mean_before, 8.5) as store_mean_sales")


def assemble_vector(rows: DataFrame) -> DataFrame:
    """With the numbers as one vector."""
    from pyspark.ml.feature import VectorAssembler

    return VectorAssembler(inputCols=list(NUMBERS), outputCol="numbers").transform(rows)


def make_model() -> Any:
    """An embedding for each category, the numbers normalised by their batch, and layers over both."""
    inputs = [keras.Input((1,), dtype="int32", name=name) for name in CATEGORIES]
    embedded = [
        keras.layers.Flatten()(keras.layers.Embedding(values, width, name=f"embedded_{name}")(entered))
        for entered, (name, (values, width)) in zip(inputs, CATEGORIES.items(), strict=True)
    ]
    numbers = keras.Input((len(NUMBERS),), name="numbers")
    x = keras.layers.Concatenate()([*embedded, keras.layers.BatchNormalization(momentum=0.9)(numbers)])
    for width in (128, 64):
        x = keras.layers.Dense(width, activation="relu")(x)
    return keras.Model([*inputs, numbers], keras.layers.Dense(1)(x))


class ExpRmspe(keras.metrics.Metric):  # type: ignore[misc]
    """Root mean square percentage error of sales, from their scaled logarithms."""

    def __init__(self, log_top: float, name: str = "exp_rmspe", **others: Any) -> None:
        super().__init__(name=name, **others)
        self.log_top = log_top
        self.total = self.add_weight(name="total", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ops = keras.ops
        true = ops.exp(ops.reshape(ops.cast(y_true, self.dtype), (-1,)) * self.log_top)
        found = ops.exp(ops.reshape(ops.cast(y_pred, self.dtype), (-1,)) * self.log_top)
        self.total.assign_add(ops.sum(ops.square((true - found) / true)))
        self.rows.assign_add(ops.cast(ops.size(true), self.dtype))

    def result(self) -> Any:
        return keras.ops.sqrt(self.total / keras.ops.maximum(self.rows, 1.0))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "log_top": self.log_top}


class Attack:
    """Hears how training goes and, once, in its second epoch, kills an executor."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._once = threading.Lock()
        self.killed = False

    def __call__(self, progress: Mapping[str, Any]) -> None:
        if progress["epoch"] < 1 or not self._once.acquire(blocking=False):
            return
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_text().split("\0")
            except OSError:
                continue  # it ended while we looked
            if any("CoarseGrainedExecutorBackend" in word for word in words) and self._application in words:
                os.kill(int(path.parent.name), signal.SIGKILL)
                self.killed = True
                print(f"killed executor process {path.parent.name} with SIGKILL", flush=True)
                return


if __name__ == "__main__":
    main()
