"""Preflight on a real cluster: it reaches every host, and what is wrong with a host is one sentence."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_elastic.clusters.doctor import Finding, examine
from spark_elastic.clusters.spark.classic import preflight
from spark_elastic.clusters.spark.host_facts import collect_host_facts
from spark_elastic.clusters.spark.probe import Probe
from spark_elastic.data.store import Store
from spark_elastic.errors import PreflightError
from tests.spark.cluster import await_true
from tests.spark.conftest import HOSTS
from tests.spark.estimators import ROWS, estimator, table

pytestmark = pytest.mark.spark

HARMLESS = cloudpickle.dumps({"answer": 42})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


def probe(
    spark: SparkSession, store: Store, payload: bytes = HARMLESS, timeout: float = 60.0
) -> list[dict[str, str]]:
    wanted = Probe(payload=payload, store=store, needs=("numpy",), what="the model")
    return preflight(spark.sparkContext, wanted, timeout)


def test_the_preflight_reaches_every_host_and_leaves_nothing_in_the_store_or_on_the_driver(
    spark: SparkSession, store: Store
) -> None:
    own = Path(spark.sparkContext._temp_dir)  # of broadcasts, until their context ends
    before = sorted(own.iterdir())
    assert probe(spark, store) == [collect_host_facts()] * HOSTS
    assert store.list("probes") == []
    assert sorted(own.iterdir()) == before


def test_a_store_that_hosts_do_not_share_is_refused(spark: SparkSession) -> None:
    # The memory of a process is what no other process sees.
    with pytest.raises(PreflightError, match="does not see what the driver wrote to the store") as refused:
        probe(spark, Store.open("memory://preflight"))
    assert list(examine(spark, "memory://preflight"))[-1] == Finding(str(refused.value), refused=True)


def test_the_doctor_says_what_the_preflight_sees(spark: SparkSession, store: Store) -> None:
    *_, cluster, hosts, verdict = [str(finding) for finding in examine(spark, store.url, workers=2)]
    assert f"Spark {spark.version} at spark://" in cluster
    assert "a job would ask for 2 workers" in cluster
    ours = collect_host_facts()["spark_elastic"]
    assert hosts.startswith(f"ok       {HOSTS} executors: spark_elastic {ours}, python")
    assert verdict.endswith(f" passes its checks, and all hosts see the store {store.url}")


def test_the_preflight_awaits_no_silent_host(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    busy = str(tmp_path / "busy")
    Path(busy).mkdir()

    def occupy(numbers: Any) -> Any:
        Path(busy, f"started-{os.getpid()}").touch()
        while os.path.exists(busy):
            time.sleep(0.02)
        return numbers

    def run() -> None:
        spark.sparkContext.parallelize(range(HOSTS), HOSTS).mapPartitions(occupy).collect()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        await_true(lambda: len(os.listdir(busy)) == HOSTS, "every core to be occupied")
        with pytest.raises(PreflightError, match="no executor took a probe within 1 s"):
            probe(spark, store, timeout=1.0)
    finally:
        os.rename(busy, busy + "-over")
        thread.join()
    assert len(probe(spark, store)) == HOSTS


def test_a_host_that_cannot_train_ends_a_fit_whose_rows_are_being_computed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_beside_the_driver.py").write_text(
        "def loss(output, y):\n    return (output - y).sum()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from only_beside_the_driver import loss  # type: ignore[import-not-found]

    over, computed = tmp_path / "over", tmp_path / "computed"

    def compute(number: int, y: float) -> float:
        if number == ROWS - 1:
            until = time.monotonic() + 60.0
            while not over.exists() and time.monotonic() < until:
                time.sleep(0.1)
            computed.touch()
        return y

    slow = F.udf(compute, "double", useArrow=False)
    rows = table(spark).withColumn("y", slow("id", "y"))
    try:
        with pytest.raises(
            PreflightError, match=r"cannot load the model, optimizer or loss .*only_beside_the"
        ):
            estimator(tmp_path / "store", loss=loss, materialize="always").fit(rows)
        assert not computed.exists()
        assert list(Path(tmp_path, "store").rglob("*.parquet")) == []
    finally:
        over.touch()
        del sys.modules["only_beside_the_driver"]
