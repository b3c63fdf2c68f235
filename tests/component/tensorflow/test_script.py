"""The documented script of TensorFlow 2 under `spark-elastic-run`: a worker is killed in the middle of it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.sources import PACKAGES, ROOT

pytestmark = [pytest.mark.native, pytest.mark.timeout(400)]


def test_the_script_outlives_a_worker_and_ends_at_its_last_batch() -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, PACKAGES.values())),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    script = str(ROOT / "examples" / "tf_elastic.py")
    launcher = [sys.executable, "-m", "spark_elastic.cli", "--verbose", "-np", "2", "--min-np", "1"]
    command = [*launcher, sys.executable, script, "400"]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if "batch 20: loss" in line:
                workers_of(job.pid)[-1].kill()
    told = "".join(lines)
    assert job.returncode == 0, told
    losses = {int(line.split("batch ")[1].split(":")[0]): line for line in lines if ": loss" in line}
    assert sorted(losses)[-1] == 400, told
    assert "1 of 2 lost" in told, told
    assert float(losses[400].split("loss ")[1].split()[0]) < float(losses[10].split("loss ")[1].split()[0])


def workers_of(launcher: int) -> list[psutil.Process]:
    """The training process of each slot; spares are younger."""
    slots = [slot for slot in psutil.Process(launcher).children() if slot.children()]
    return [min(slot.children(), key=lambda child: child.create_time()) for slot in slots]
