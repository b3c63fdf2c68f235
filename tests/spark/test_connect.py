"""`run` and `fit` over Spark Connect, with a kill in the middle; what cannot work there is said before any job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark import connect_fit_job, connect_job
from tests.spark.clients import client

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.mark.parametrize(
    "master", ["local[2]", pytest.param("local-cluster[2,1,512]", marks=pytest.mark.faults)]
)
def test_a_run_over_spark_connect_survives_a_kill(tmp_path: Path, master: str) -> None:
    """Of a worker; on a cluster of executors, of one of them. The event log has none of the job's secrets."""
    seen = client("tests.spark.connect_job", master, tmp_path)
    assert seen["number"] == "over Spark Connect the number of workers cannot be looked up: give num_workers."
    assert seen["ship"].startswith("ship=True does not work over Spark Connect")
    assert [result[0] for result in seen["results"]] == [connect_job.STEPS] * 2
    assert [result[2:] for result in seen["results"]] == [[len(connect_job.SECRET), ""]] * 2
    assert seen["fit"] == {"exact": True, "shown": True}
    survivor = seen["results"][0][1]
    assert len(survivor) >= 2, "it saw the world before the kill and one after it"
    assert (survivor[0], survivor[-1]) == (2, 2)
    events = [path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file()]
    assert any(b"SparkListenerJobStart" in text for text in events)
    needles = [connect_job.SECRET, *seen["keys"]]
    needles += [bytes.fromhex(key).decode("latin-1") for key in seen["keys"]]
    assert not [needle for needle in needles for text in events if needle.encode("latin-1") in text]


@pytest.mark.faults
@pytest.mark.timeout(800)
def test_a_fit_over_spark_connect_survives_kills_with_a_reachable_and_an_unreachable_client(
    tmp_path: Path,
) -> None:
    """Of a worker, and of the executor that the coordinator runs in."""
    seen = client("tests.spark.connect_fit_job", "local-cluster[3,1,512]", tmp_path, 780)
    beside, afar = seen["beside"], seen["afar"]
    assert (beside["injected"], beside["exact"], beside["once"], beside["same"]) == (1, True, True, True)
    assert beside["recoveries"] >= 1
    assert beside["piped"] == connect_fit_job.estimators.ROWS
    assert afar["coordinators"] == 2
    assert f"cannot reach the driver at {connect_fit_job.NOBODY}" in afar["told"][0]
    assert afar["told"][1].endswith("the run continues from its newest checkpoint")
    assert "checkpoint" in afar["began"]
    assert afar["shown"] == connect_fit_job.estimators.ROWS
    assert (afar["exact"], afar["channels"]) == (True, [])
    assert seen["keras"][-1] < seen["keras"][0]
