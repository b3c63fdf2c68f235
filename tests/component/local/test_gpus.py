"""Slots of a machine take its GPUs, one each. The GPUs are names here: nothing of CUDA is loaded."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.component.local.watched import run_command

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

SCRIPT = """
import os, spark_elastic
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], spark_elastic.task_resources())
"""
GPUS = [f"GPU-{os.getpid()}-{number}" for number in range(2)]  # which no other test takes


def _run(folder: Path, gpus: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    settings = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "SPARK_ELASTIC_FAILURE_BUDGET": "0"}
    return run_command(folder, *options, "train.py", **settings)


def test_workers_of_a_machine_see_a_gpu_each(tmp_path: Path) -> None:
    done = _run(tmp_path, GPUS, "--min-np", "2", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    for gpu in GPUS:
        assert f"sees {gpu} {{'gpu': ('{gpu}',)}}" in done.stdout


def test_a_job_goes_on_with_as_many_workers_as_there_are_gpus(tmp_path: Path) -> None:
    """Nothing has failed: a slot without a GPU says so, and takes no part."""
    done = _run(tmp_path, GPUS[:1], "--min-np", "1", "--start-timeout", "1", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sees") == 1
    assert (
        "device='cuda', and its GPU is taken by another slot of this host: lower num_workers" in done.stderr
    )


def test_fewer_gpus_than_workers_that_are_needed_are_one_sentence(tmp_path: Path) -> None:
    done = _run(tmp_path, GPUS[:1], "--min-np", "2", "--device", "cuda")
    assert done.returncode == 1
    assert "this host shows 1 GPUs, for 1 slots, where the job needs 2 workers" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_fewer_gpus_on_hosts_that_come_later_are_named_when_time_is_up(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    done = _run(
        tmp_path, GPUS[:1], "--min-np", "2", "--elastic-timeout", "8", "--device", "cuda",
        "--host-discovery-script", str(script),
    )  # fmt: skip
    assert done.returncode == 1
    # On a busy machine the worker with the GPU may not have come either.
    assert re.search(r"NotEnoughWorkers: [01] workers came within 8 s and 2 are needed", done.stderr)
    assert "said: device='cuda', and its GPU is taken by another slot of this host" in done.stderr


def test_workers_on_the_cpu_see_no_gpu(tmp_path: Path) -> None:
    done = _run(tmp_path, GPUS, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sees  {}") == 2
