"""A run on real Spark is resumed by its run_id, with other workers, from the table that it began with alone (R19)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, JobCancelled
from spark_elastic.estimators.dataframes.materialize import (
    ValidationSplit,
    WriteOptions,
    find_difference,
    materialize,
)
from spark_elastic.runs.checkpoint import CheckpointStore
from tests.scenarios import Fault
from tests.spark.estimators import ROWS, Net, compute_mse, estimator, is_close, table, train_plain
from tests.spark.fits import GatedNet

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(900)]

Change = Callable[[DataFrame], DataFrame]
CHANGES: list[tuple[Change, str | None]] = [
    (lambda df: df, None),
    (lambda df: df.repartition(5).orderBy(F.desc("id")), None),
    (lambda df: df.withColumn("y", F.col("y") * (1 + 1e-15)), None),  # as a sum in another order has it
    (lambda df: df.withColumn("unused", F.lit(1)), None),
    (lambda df: df.where("id < 36"), "it had 48 rows and has 36"),
    (lambda df: df.limit(0), "it had 48 rows and has 0"),
    (lambda df: df.withColumn("y", F.expr("y + if(id = 7, 0.1, 0)")), "other values"),
    (lambda df: df.where("id < 24").unionAll(df.where("id < 24")), "other values"),
    (lambda df: df.withColumn("y", F.col("y").cast("float")), "column 'y' was float64 and is float32"),
]


def add_validation_column(df: DataFrame) -> DataFrame:
    """With a column that says which rows validate."""
    return df.withColumn("v", F.col("id") % 4 == 0)


@pytest.mark.faults
@pytest.mark.parametrize("splits", [False, True])
def test_r19_a_recomputed_table_is_recognised(spark: SparkSession, tmp_path: Path, splits: bool) -> None:
    store, split = Store.open(str(tmp_path)), ValidationSplit("v", 1) if splits else None
    options = WriteOptions(split=split)
    df = add_validation_column(table(spark))
    rows, validation = materialize(df, ["x", "y"], store, options)
    written = [rows] if validation is None else [rows, validation]
    for number, (change, says) in enumerate(CHANGES):
        changed = add_validation_column(change(table(spark)))
        found = find_difference(changed, ["x", "y"], options, written)
        assert found == says or (found is not None and says is not None and says in found), number
    if split is not None:
        other = table(spark).withColumn("v", F.col("id") % 4 == 1)
        assert find_difference(other, ["x", "y"], options, written) == "its rows have other values"


EPOCHS = 80  # of one step each


@pytest.mark.scenario("G18")
def test_p7_r19_a_cancelled_fit_resumes_at_a_step(spark: SparkSession, tmp_path: Path, fault: Fault) -> None:
    for module in (GatedNet.__module__, Net.__module__):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    gate, df, cancelled = tmp_path / "gate", table(spark), threading.Event()
    net, checkpoints = GatedNet(gate), CheckpointStore(Store.open(str(tmp_path)), "mine")

    def follow(numbers: Mapping[str, Any]) -> None:
        if not cancelled.is_set() and numbers["epoch"] >= 4 and checkpoints.read_published():
            cancelled.set()
            threading.Thread(target=lambda: fault(spark.sparkContext.cancelAllJobs)).start()
        if not fault.on:
            gate.touch()

    est = estimator(
        tmp_path,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        batch_size=ROWS // 3,
        num_workers=3,
        epochs=EPOCHS,
        run_id="mine",
        checkpoint_steps=4,
        on_progress=follow,
    )
    with pytest.raises(JobCancelled):
        est.fit(df)
    gate.touch()
    assert list((tmp_path / "runs" / "mine" / "rows").rglob("*.parquet")), "the run's rows are gone"
    with pytest.raises(InvalidInput, match="began with batch_size=16 and this fit has 8"):
        est.copy({est.batch_size: 8}).fit(df)
    model = est.copy({est.num_workers: 2}).fit(df)
    first = model.summary.worlds[0]
    assert first.size == 2
    # Spark ends the slots: what their hosts keep is newer than the checkpoint, unless the driver was quicker.
    assert "continues from checkpoint" in first.reason or "memory has kept it" in first.reason
    assert len(model.history) == EPOCHS
    assert is_close(model, train_plain(df, EPOCHS, compute_mse))
    assert not (tmp_path / "runs" / "mine" / "rows").exists()

    again = est.fit(df)
    assert again.summary.worlds == (), "a finished run was trained again"
    assert again.summary.digest == model.summary.digest
    with pytest.raises(InvalidInput, match=f"has ended, with epochs={EPOCHS}, not {EPOCHS + 1}"):
        est.copy({est.epochs: EPOCHS + 1}).fit(df)
    with pytest.raises(InvalidInput, match="began with another table"):
        est.fit(df.where("id < 24"))
    with pytest.raises(InvalidInput, match="'mine' names one run, and this would make several"):
        est.fit(df, [{est.learning_rate: rate} for rate in (0.1, 0.5)])
