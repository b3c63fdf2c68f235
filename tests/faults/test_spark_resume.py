"""P7 on real Spark: a driver process is killed in mid-fit, and another's fit under the same run_id ends the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch

from spark_elastic.data.store import Store
from spark_elastic.state.checkpoint import Checkpoints
from tests.scenarios import Fault
from tests.spark.cluster import LOOPBACK, REPOSITORY, cluster_environment

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.native, pytest.mark.timeout(400)]

RUN = "killed"
PROGRAM = "import sys; from tests.faults.test_spark_resume import train; train(sys.argv[1])"


def train(store: str) -> None:
    """A driver's whole life; says how the first world began and whether the weights are the plain loop's."""
    from pyspark.sql import SparkSession

    from tests.spark import test_estimator, test_resume

    for module in (test_estimator, test_resume):
        cloudpickle.register_pickle_by_value(module)
    builder = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
    for side in ("host", "bindAddress"):
        builder = builder.config(f"spark.driver.{side}", LOOPBACK)
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    df, net = test_estimator.table(spark), test_resume.Slow()
    fit = test_estimator.estimator(
        Path(store),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        epochs=test_resume.EPOCHS,
        run_id=RUN,
        checkpoint_steps=4,
    )
    model = fit.fit(df)
    exact = test_estimator.close_to(model, test_estimator.plain(df, test_resume.EPOCHS, test_estimator.mse))
    began = model.summary.worlds[0].reason
    sys.stdout.write(f"ended: {len(model.history)} epochs, exact {exact}, {began}\n")
    spark.stop()


def _driver(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | cluster_environment(folder / "scratch")
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env=environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.scenario("G18")
def test_p7_a_killed_driver_of_spark_leaves_a_run_that_goes_on(tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "scratch").mkdir()
    store = Store.open(str(tmp_path))
    with _driver(tmp_path) as first:
        until = time.monotonic() + 120
        while not Checkpoints(store, RUN).published() and time.monotonic() < until:
            assert first.poll() is None, "it ended before its first checkpoint"
            time.sleep(0.02)
        fault(first.kill)
        first.communicate(timeout=120)
    assert first.returncode == -signal.SIGKILL
    with _driver(tmp_path) as second:
        said, _ = second.communicate(timeout=200)
    assert second.returncode == 0
    last = said.splitlines()[-1]
    assert last.startswith("ended: 60 epochs, exact True, "), said
    assert "goes on from checkpoint 000001-" in last
