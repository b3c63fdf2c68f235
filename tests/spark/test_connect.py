"""`run` over Spark Connect, with a kill in the middle; what cannot work there is said before any job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark import connect_job
from tests.spark.cluster import cluster_environment

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.mark.parametrize(
    "master", ["local[2]", pytest.param("local-cluster[2,1,512]", marks=pytest.mark.faults)]
)
def test_a_run_lives_through_a_kill(tmp_path: Path, master: str) -> None:
    """Of a worker; on a cluster of executors, of one of them. The event log has none of the job's secrets."""
    ephemeral = {"SPARK_TESTING": "1"}  # the server's port, which is a fixed one otherwise
    done = subprocess.run(
        [sys.executable, connect_job.__file__, master, str(tmp_path)],
        env=os.environ | cluster_environment(tmp_path) | ephemeral,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["number"] == "over Spark Connect the number of workers cannot be looked up: give num_workers."
    assert seen["ship"].startswith("ship=True does not work over Spark Connect")
    assert seen["fit"].startswith("fit() does not work on a session of Spark Connect")
    assert [result[0] for result in seen["results"]] == [connect_job.STEPS] * 2
    assert [result[2] for result in seen["results"]] == [len(connect_job.SECRET)] * 2
    survivor = seen["results"][0][1]
    assert len(survivor) >= 2, "it saw the world before the kill and one after it"
    assert (survivor[0], survivor[-1]) == (2, 2)
    events = [path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file()]
    assert any(b"SparkListenerJobStart" in text for text in events)
    needles = [connect_job.SECRET, *seen["keys"]]
    needles += [bytes.fromhex(key).decode("latin-1") for key in seen["keys"]]
    assert not [needle for needle in needles for text in events if needle.encode("latin-1") in text]
