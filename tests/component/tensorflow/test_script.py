"""The documented script of TensorFlow 2 under `spark-elastic-run`: a worker is killed in the middle of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.sources import PYTHONPATH, ROOT

# In every build test_hand_written.py loses a worker.
pytestmark = [pytest.mark.native, pytest.mark.faults, pytest.mark.timeout(400)]
BATCHES = 200
HELD = """
# Runs the script that follows the name of a file; its batch 60 waits until that file is there.
import os, runpy, sys, time
import spark_elastic.tensorflow as hvd

go, script = sys.argv.pop(1), sys.argv.pop(1)
commit = hvd.elastic.TensorFlowKerasState.commit

def held(state):
    while state.batch == 60 and not os.path.exists(go):
        time.sleep(0.02)
    commit(state)

hvd.elastic.TensorFlowKerasState.commit = held
runpy.run_path(script, run_name="__main__")
"""


def test_a_script_survives_a_lost_worker_and_ends_at_its_last_batch(tmp_path: Path) -> None:
    environment = (
        os.environ
        | {
            "PYTHONPATH": PYTHONPATH,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "SPARK_ELASTIC_SPARE_AFTER": "600",  # tests/component/local has spares; here each would import TensorFlow
        }
    )
    held, go, script = tmp_path / "held.py", tmp_path / "go", ROOT / "examples" / "tf_elastic.py"
    held.write_text(HELD)
    launcher = [sys.executable, "-m", "spark_elastic.clusters.cli", "--verbose", "-np", "2", "--min-np", "1"]
    command = [*launcher, sys.executable, str(held), str(go), str(script), str(BATCHES)]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if "batch 20: loss" in line:
                workers_of(job.pid)[-1].kill()
                go.touch()
    told = "".join(lines)
    assert job.returncode == 0, told
    reports = {int(line.split("batch ")[1].split(":")[0]): line for line in lines if ": loss" in line}
    losses = {batch: float(line.split("loss ")[1].split()[0]) for batch, line in reports.items()}
    assert sorted(losses)[-1] == BATCHES, told
    assert "1 of 2 lost" in told, told
    assert losses[BATCHES] < losses[10]


def workers_of(launcher: int) -> list[psutil.Process]:
    """The training process of each slot."""
    return [child for slot in psutil.Process(launcher).children() for child in slot.children()]
