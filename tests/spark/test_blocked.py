"""A fit where py4j is refused Spark's inner parts."""

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


def test_a_fit_lives_through_a_kill_where_users_are_kept_out(tmp_path: Path) -> None:
    seen = client("tests.spark.blocked_job", "local-cluster[2,1,512]", tmp_path, 780)
    assert (seen["exact"], seen["injected"]) == (True, 1)
    assert seen["recoveries"] >= 1
    assert seen["shown"] == 48
    assert {"schedulerBackend", "statusTracker"} <= set(seen["asked"])
    assert len(seen["told"]) == 1
