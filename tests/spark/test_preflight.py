"""Preflight on a real cluster: it reaches every host, and what is wrong with a host is one sentence."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pyspark.sql import SparkSession

from spark_elastic.clusters.doctor import Finding, examine
from spark_elastic.clusters.spark.classic import preflight
from spark_elastic.clusters.spark.host_facts import collect_host_facts
from spark_elastic.clusters.spark.probe import Probe
from spark_elastic.data.store import Store
from spark_elastic.errors import PreflightError
from tests.spark.cluster import await_true
from tests.spark.conftest import HOSTS

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
