"""The examples that lose a worker, as a user starts them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("example", "end"),
    [
        ("ddp.py", "64 steps; each row once per epoch: True"),
        ("fsdp2.py", "64 steps; each row once per epoch: True"),
        ("lightning_trainer.py", "64 steps; the loss over all rows is 0.0"),
        ("fine_tune.py", "64 steps; the loss fell from "),
        ("forecaster.py", "108 steps; the mean error of 7 days is 0.0"),
    ],
)
def test_an_example_loses_a_worker_and_continues_with_the_step_in_flight(example: str, end: str) -> None:
    command = [sys.executable, f"examples/{example}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 workers became 2: step 21 came" in done.stdout, done.stdout[-3000:]
    assert end in done.stdout, done.stdout[-3000:]


def test_an_estimator_that_compares_rows_loses_a_worker_and_no_row() -> None:
    command = [sys.executable, "examples/embeddings.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 workers became 2 within" in done.stdout, done.stdout[-3000:]
    assert done.stdout.count("1536 rows, 0 missing, 0 duplicated") == 4, done.stdout[-3000:]
