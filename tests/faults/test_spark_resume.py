"""P7 on real Spark: a driver is killed in mid-run, and another's `fit` or `run` under the same run_id ends the run."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import pytest
import torch
from pyspark.sql import SparkSession

import spark_elastic
from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoint import CheckpointStore
from tests.component.torch import hand_written
from tests.component.torch.hand_written import assert_exact
from tests.scenarios import Fault
from tests.sources import ROOT
from tests.spark import estimators
from tests.spark.cluster import LOOPBACK, cluster_environment
from tests.spark.fits import GatedNet

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.native, pytest.mark.timeout(800)]

RUN = "killed"
EPOCHS = 120  # of one step each
STEPS = 200
PROGRAM = (
    "import sys; from tests.faults import test_spark_resume as here; getattr(here, sys.argv[1])(sys.argv[2])"
)


@contextmanager
def session() -> Iterator[SparkSession]:
    builder = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
    for side in ("host", "bindAddress"):
        builder = builder.config(f"spark.driver.{side}", LOOPBACK)
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    yield spark
    spark.stop()


def run_fit(store: str) -> None:
    """A driver's whole life; says how the first world began and whether the weights are the plain loop's."""
    for module in (estimators, sys.modules[GatedNet.__module__]):
        cloudpickle.register_pickle_by_value(module)
    with session() as spark:
        df, net = estimators.table(spark), GatedNet(Path(store, "gate"))
        fit = estimators.estimator(
            Path(store),
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
            epochs=EPOCHS,
            num_workers=2,
            batch_size=estimators.ROWS // 2,
            run_id=RUN,
            checkpoint_steps=4,
            keep_commits=False,
        )
        model = fit.fit(df)
        plain = estimators.train_plain(df, EPOCHS, estimators.compute_mse)
    assert estimators.is_close(model, plain)
    assert len(model.history) == EPOCHS
    sys.stdout.write(f"ended: {model.summary.worlds[0].reason}\n")


def run_loop(store: str) -> None:
    """The same with a hand-written loop; the first step that is taken is the one after the newest durable commit."""
    cloudpickle.register_pickle_by_value(hand_written)
    durable, lines = CheckpointStore(Store.open(store), RUN).read_published(), io.StringIO()
    with session() as spark:
        results = spark_elastic.run(
            hand_written.train,
            (STEPS, {}),
            num_workers=2,
            min_workers=1,
            spark=spark,
            run_id=RUN,
            store=store,
            checkpoint_steps=3,
            keep_commits=False,
            stdout=lines,
        )
    assert_exact(results, STEPS)
    (position,) = {checkpoint.position.step for checkpoint in durable[:1]}
    assert results[0]["trained"] == list(range(position, STEPS))
    (reason,) = [line for line in lines.getvalue().splitlines() if "continues from" in line]
    sys.stdout.write(f"ended: {reason}\n")


def _start_driver(program: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | cluster_environment(folder / "scratch")
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, program, str(folder)],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.scenario("G18")
@pytest.mark.parametrize("program", ["run_fit", "run_loop"])
def test_p7_a_run_resumes_after_its_spark_driver_was_killed(
    tmp_path: Path, fault: Fault, program: str
) -> None:
    (tmp_path / "scratch").mkdir()
    store = Store.open(str(tmp_path))
    with _start_driver(program, tmp_path) as first:
        until = time.monotonic() + 240
        while not CheckpointStore(store, RUN).read_published() and time.monotonic() < until:
            assert first.poll() is None, "it ended before its first checkpoint"
            time.sleep(0.02)
        fault(first.kill)
        (tmp_path / "gate").touch()
        first.communicate(timeout=120)
    assert first.returncode == -signal.SIGKILL
    with _start_driver(program, tmp_path) as second:
        said, _ = second.communicate(timeout=400)
    assert second.returncode == 0
    last = said.splitlines()[-1]
    assert last.startswith("ended: "), said
    assert "continues from checkpoint 000001-" in last
