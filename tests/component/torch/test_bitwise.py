"""Bitwise mode on real processes: the weights have one SHA-256 for any number of workers and any loss of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch import bitwise, hand_written
from tests.component.torch.bitwise import STEPS, BitwiseJob, everything, hash_state, train
from tests.component.torch.hand_written import Run
from tests.component.torch.job import Follower, launcher, make_data, train_elastic
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]

for module in (bitwise, hand_written):
    cloudpickle.register_pickle_by_value(sys.modules[module.__name__])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def test_the_estimators_weights_and_losses_have_the_same_bits_after_a_kill(
    tmp_path: Path, fault: Fault
) -> None:
    """One worker, and three of which one dies and is replaced. Class weights make the divisors of the steps' losses
    numbers that are not whole."""
    data = make_data(tmp_path)
    loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.1, 0.3]))
    found = []
    for workers in (1, 3):
        job = BitwiseJob(
            everything(), adam, loss, shape=(1, 6, 6), gradient_clip_norm=0.05, epochs=1, workers=workers
        )
        made: list[ProcessLauncher] = []

        def make(
            task: TorchTrainProgram, made: list[ProcessLauncher] = made, room: int = workers
        ) -> ProcessLauncher:
            made.append(launcher(task, room=room))
            return made[0]

        def kill_one(made: list[ProcessLauncher] = made) -> None:
            fault(kill, made[0], max(made[0].slots()))

        blows = {"epoch 0": kill_one} if workers > 1 else {}
        with inject_faults(tmp_path / f"faults-{workers}", blows):
            weights, result = train_elastic(job, *data, None, Follower(), make)
        assert result.worlds[0].size == workers
        assert len(result.worlds) > 1 or workers == 1, "nobody was lost"
        history = json.loads(result.results[0])["history"]
        found.append((hash_state(weights), history[0]["loss"].hex()))
    assert found[0] == found[1]


@pytest.mark.faults
def test_a_loops_weights_have_the_same_bits_after_a_kill(fault: Fault) -> None:
    """Sparse gradients, noise in the rows, and reading processes."""
    alone = Run(train, ("embedding", {}), room=1, num_workers=1).results()
    run = Run(train, ("embedding", {9: 2} if fault.on else {}, 1), room=3, num_workers=3)
    run.at(4, lambda: fault(run.workers()[1].kill))
    results = run.results()
    assert run.sizes()[0] == 3
    assert len(run.sizes()) > 1, "nobody was lost"
    assert {result["sha256"] for result in results} == {alone[0]["sha256"]}
    assert max(result["trained"][-1] for result in results) == STEPS - 1
