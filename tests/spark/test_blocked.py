"""Fits and runs where Spark's inner parts are refused: at py4j's wire, and as standard access mode does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.clients import client

pytestmark = [
    pytest.mark.faults,
    pytest.mark.spark,
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.timeout(800),
]


def test_a_fit_and_a_run_need_nothing_that_standard_access_mode_refuses(tmp_path: Path) -> None:
    """No RDD, SparkContext, JVM object or setting other than Spark SQL's; a worker is killed in the middle."""
    seen = client("tests.spark.standard_access_job", "local[2]", tmp_path, 780)
    assert (seen["exact"], seen["injected"], seen["shown"]) == (True, 1, 48)
    assert seen["run"] == [0, 2]
    # Whether there is a SparkContext is asked once for each session; nothing else is tried.
    assert set(seen["asked"]) <= {"sparkContext"}


def test_a_fit_survives_a_kill_on_a_cluster_in_standard_access_mode(tmp_path: Path) -> None:
    seen = client("tests.spark.blocked_job", "local-cluster[2,1,512]", tmp_path, 780)
    assert (seen["exact"], seen["injected"]) == (True, 1)
    assert seen["recoveries"] >= 1
    assert seen["shown"] == 48
    assert {"schedulerBackend", "statusTracker"} <= set(seen["asked"])
    assert len(seen["told"]) == 1
