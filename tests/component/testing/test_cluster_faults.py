"""Faults of the testing kit on a real world of processes: each falls once, and the world takes all steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spark_elastic.testing import ClusterFaults, InjectedFault
from tests.component.local.watched import run_command

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(150)]

STEPS = 30
FAULTS = [
    InjectedFault("cut", 5, rank=1),
    InjectedFault("kill worker", 10, rank=0),
    InjectedFault("stop", 15, rank=1, seconds=0.5),
    InjectedFault("slow", 20, pause=0.02),
]
SCRIPT = f"""
import sys
import numpy as np
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.testing import InjectedFault, ClusterFaults
from spark_elastic.worker.context import get_context

faults = ClusterFaults({FAULTS!r}, sys.argv[1])

def loop(state):
    group = get_context().group
    while state.step < {STEPS}:
        faults.inject(state.step, group.rank, group.size)
        group.allreduce(np.ones(10))
        state.step += 1
        state.commit()
    print("steps", state.step, flush=True)

elastic(loop)(ObjectState(step=0))
"""


def test_each_fault_is_injected_once_and_the_world_takes_all_steps(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = str(tmp_path / "faults")
    run = run_command(tmp_path, "--min-np", "1", "-H", "localhost:2", sys.executable, str(script), folder)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    # One who was lost may come back after the end.
    assert run.stdout.count(f"steps {STEPS}") >= 1, run.stdout
    struck = ClusterFaults(FAULTS, folder).read_injected()
    assert [fault["kind"] for fault in struck] == [fault.kind for fault in FAULTS]
