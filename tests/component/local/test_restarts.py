"""`spark-elastic-run --restarts`: the driver is killed, and another one continues the run at the step."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.component.local.watched import run_command

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

# One of its ranks kills the driver, the parent of its slot, before the fifth step.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np, psutil
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.worker.context import get_context

steps, struck = int(sys.argv[1]), Path("struck")

def loop(state):
    while state.step < steps:
        if state.step == 5 and get_context().world.me.rank == 0 and not struck.exists():
            struck.touch()
            drivers = [p for p in psutil.Process().parents() if "spark_elastic.clusters.cli" in p.cmdline()]
            drivers[0].kill()
            time.sleep(60)
        ones = np.ones(1)
        get_context().group.allreduce(ones)
        state.total += float(ones[0]) / get_context().group.size
        state.step += 1
        print("step", state.step, flush=True)
        state.commit()

state = ObjectState(step=0, total=0.0)
elastic(loop)(state)
print("total", state.total, flush=True)
"""


def _run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return run_command(folder, "-H", "localhost:2", *options, "python", "train.py", "12")


def test_r23_a_killed_driver_is_started_again_and_continues_at_the_step(tmp_path: Path) -> None:
    done = _run(tmp_path, "--restarts", "2", "--run-id", "mine", "--store", str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    again = "the driver was killed by SIGKILL; it starts again and continues the run (1 restarts left)"
    assert again in done.stderr
    assert done.stderr.count("starts again") == 1
    assert done.stdout.count("total 12.0") == 2
    assert len(re.findall(r"step \d+\n", done.stdout)) <= 2 * 12, "a step was repeated"
    assert done.stdout.count("step 6\n") == 2
