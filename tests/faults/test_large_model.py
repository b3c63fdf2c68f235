"""A model that is too large for each worker: FSDP2 under the Trainer, through kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from tests.component.torch import hand_written
from tests.faults import large_model
from tests.faults.large_model import WORKERS
from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(1800)]

for module in (hand_written, large_model):
    cloudpickle.register_pickle_by_value(module)


def test_workers_train_what_needs_twice_the_memory_that_each_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.large_model", str(tmp_path)]
    alone = json.loads(subprocess.check_output(command, cwd=ROOT, timeout=900).splitlines()[-1])
    assert alone["parameters"] > 59e6
    run = hand_written.Run(
        large_model.train, (str(tmp_path), alone["bytes"] // 2), room=WORKERS, spares=True,
        num_workers=WORKERS, min_workers=WORKERS, max_workers=WORKERS,
    )  # fmt: skip
    for step in (2, 3):
        run.at(step, lambda: [worker.kill() for worker in run.workers()[1:2]])
    results = run.results()
    assert run.sizes() == [WORKERS] * 3, "no worker was lost, or another took no place"
    for result in results:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert result["bytes"] <= alone["bytes"] // 2
    print(alone, [result["bytes"] for result in results])  # noqa: T201 - with -rP
