"""A fit that ended early is resumed by its run_id, with other workers, and finished work is not repeated."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, JobCancelled
from spark_elastic.runs.checkpoint import CheckpointStore
from tests.scenarios import Fault
from tests.spark.estimators import Net, compute_mse, estimator, is_close, table, train_plain
from tests.spark.fits import GatedNet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

EPOCHS = 80  # of one step each


@pytest.mark.scenario("G18")
def test_p7_r19_a_cancelled_fit_resumes_at_its_step(
    spark: SparkSession, tmp_path: Path, fault: Fault
) -> None:
    for module in (GatedNet.__module__, Net.__module__):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    gate, df, cancelled = tmp_path / "gate", table(spark), threading.Event()
    net, checkpoints = GatedNet(gate), CheckpointStore(Store.open(str(tmp_path)), "mine")

    def follow(numbers: Mapping[str, Any]) -> None:
        if not cancelled.is_set() and numbers["epoch"] >= 6 and checkpoints.read_published():
            cancelled.set()
            threading.Thread(target=lambda: fault(spark.sparkContext.cancelAllJobs)).start()
        if not fault.on:
            gate.touch()

    est = estimator(
        tmp_path,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
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
