"""The test bodies of devices on the pretend accelerator, in a process of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.devices import ONLY

ROOT = Path(__file__).parents[3]
BODIES = ("tests/pretend_checks.py", "tests/component/torch/test_devices.py")
KILLS = (
    "tests/component/torch/test_elastic_training.py::test_p1_p2_p3_p4_hold_on_a_device",
    "tests/component/torch/test_distributed.py::test_ddp_on_a_device_that_all_workers_share_continues_after_a_kill",
)


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13),
    reason="pretend_device.cc is written for what torch 2.13 and newer ask of a device",
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles pretend_device.cc")
@pytest.mark.native
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tests", "least"),
    [(BODIES, 19), pytest.param(KILLS, 2, marks=pytest.mark.faults)],
    ids=["bodies", "kills"],
)
def test_trainings_on_the_pretend_accelerator(tests: tuple[str, ...], least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    env = os.environ | {ONLY: "pretend"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least
