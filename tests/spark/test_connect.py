"""Sessions without a SparkContext or with a part of one, in programs of their own, with kills in the middle.

Over Spark Connect, where what cannot work is said before any job, and where py4j refuses Spark's inner parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sources import ROOT
from tests.spark.client_programs import NOBODY, SECRET
from tests.spark.cluster import cluster_environment
from tests.spark.estimators import ROWS, SEEN

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(800)]


def run_client(program: str, master: str, folder: Path) -> Any:
    """What a program of `client_programs` says with its last line."""
    ephemeral = {"SPARK_TESTING": "1"}  # the server's port, which is a fixed one otherwise
    command = [sys.executable, "-m", "tests.spark.client_programs", program, master, str(folder)]
    environment = os.environ | cluster_environment(folder) | ephemeral
    how: Any = {"capture_output": True, "text": True, "timeout": 780, "env": environment}
    done = subprocess.run(command, cwd=ROOT, check=False, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_and_a_fit_over_spark_connect_in_which_a_worker_is_killed(tmp_path: Path) -> None:
    """The event log has none of the jobs' secrets."""
    seen = run_client("run_over_connect", "local[2]", tmp_path)
    assert seen["number"] == "over Spark Connect the number of workers cannot be looked up: give num_workers."
    assert seen["ship"].startswith("ship=True does not work over Spark Connect")
    assert seen["results"] == [[len(SECRET), ""]] * 2
    assert seen["fit"] == SEEN
    events = [path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file()]
    assert any(b"SparkListenerJobStart" in text for text in events)
    needles = [SECRET, *seen["keys"]]
    needles += [bytes.fromhex(key).decode("latin-1") for key in seen["keys"]]
    assert not [needle for needle in needles for text in events if needle.encode("latin-1") in text]


@pytest.mark.faults
def test_a_fit_over_spark_connect_survives_kills_and_needs_nothing_that_standard_access_mode_refuses(
    tmp_path: Path,
) -> None:
    """Of a worker, and of the executor that the coordinator runs in where executors cannot reach the client."""
    seen = run_client("fit_over_connect", "local-cluster[3,1,512]", tmp_path)
    beside, afar = seen["beside"], seen["afar"]
    assert beside == {"fit": SEEN, "once": True, "piped": ROWS}
    assert afar["coordinators"] == 2
    assert f"cannot reach the driver at {NOBODY}" in afar["told"][0]
    assert afar["told"][1].endswith("the run continues from its newest checkpoint")
    assert "checkpoint" in afar["began"]
    assert afar["shown"] == ROWS
    assert (afar["exact"], afar["channels"]) == (True, [])
    assert seen["keras"][-1] < seen["keras"][0]
    # Whether there is a SparkContext is asked once for each session; nothing else is tried.
    assert set(seen["asked"]) <= {"sparkContext"}


@pytest.mark.faults
def test_a_fit_survives_a_kill_where_py4j_refuses_sparks_inner_parts(tmp_path: Path) -> None:
    seen = run_client("fit_where_py4j_denies", "local-cluster[2,1,512]", tmp_path)
    assert seen["fit"] == SEEN
    assert {"schedulerBackend", "statusTracker"} <= set(seen["asked"])
    assert len(seen["told"]) == 1
