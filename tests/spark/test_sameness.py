"""R19 on real Spark: which tables are the one that a run began with, and that no other one gets its model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import pytest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframes.materialize import (
    ValidationSplit,
    WriteOptions,
    find_difference,
    materialize,
)
from tests.spark.estimators import Net, estimator, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(900)]

Change = Callable[["DataFrame"], "DataFrame"]
CHANGES: list[tuple[Change, str | None]] = [
    (lambda df: df, None),
    (lambda df: df.repartition(5).orderBy(F.desc("id")), None),
    (lambda df: df.withColumn("y", F.col("y") * (1 + 1e-15)), None),  # as a sum in another order has it
    (lambda df: df.withColumn("unused", F.lit(1)), None),
    (lambda df: df.where("id < 36"), "it had 48 rows and has 36"),
    (lambda df: df.limit(0), "it had 48 rows and has 0"),
    (
        lambda df: df.withColumn("y", F.col("y") + F.when(F.col("id") == 7, 0.1).otherwise(0.0)),
        "other values",
    ),
    (lambda df: df.where("id < 24").unionAll(df.where("id < 24")), "other values"),
    (lambda df: df.withColumn("y", F.col("y").cast("float")), "column 'y' was float64 and is float32"),
]


def add_validation_column(df: DataFrame) -> DataFrame:
    """With a column that says which rows validate."""
    return df.withColumn("v", F.col("id") % 4 == 0)


@pytest.mark.parametrize("splits", [False, True])
def test_r19_a_recomputed_table_with_the_same_rows_is_recognised(
    spark: SparkSession, tmp_path: Path, splits: bool
) -> None:
    store, split = Store.open(str(tmp_path)), ValidationSplit("v", 1) if splits else None
    options = WriteOptions(split=split)
    df = add_validation_column(table(spark))
    rows, validation = materialize(df, ["x", "y"], store, options)
    written = [rows] if validation is None else [rows, validation]
    for number, (change, says) in enumerate(CHANGES):
        found = find_difference(add_validation_column(change(table(spark))), ["x", "y"], options, written)
        assert found == says or (found is not None and says is not None and says in found), number
    if split is not None:
        other = table(spark).withColumn("v", F.col("id") % 4 == 1)
        assert find_difference(other, ["x", "y"], options, written) == "its rows have other values"


def test_r19_another_fold_or_table_is_refused_for_a_run(spark: SparkSession, tmp_path: Path) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[Net.__module__])
    df, est = table(spark), estimator(tmp_path, run_id="mine", epochs=2)
    first = est.fit(df)
    again = est.fit(table(spark))
    assert again.summary.worlds == (), "a finished run was trained again"
    assert again.summary.digest == first.summary.digest
    with pytest.raises(InvalidInput, match="began with another table"):
        est.fit(df.where("id < 24"))
    with pytest.raises(InvalidInput, match=r"began with learning_rate=None and this fit has 0\.5"):
        est.fit(df, {est.learning_rate: 0.5})
    grid = ParamGridBuilder().addGrid(est.learning_rate, [0.1, 0.5]).build()
    search = CrossValidator(
        estimator=est, estimatorParamMaps=grid, evaluator=RegressionEvaluator(labelCol="y"), numFolds=2
    )
    with pytest.raises(InvalidInput, match="'mine' names one run, and this would make several"):
        search.fit(df)
