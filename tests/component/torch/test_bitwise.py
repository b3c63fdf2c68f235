"""Bitwise mode on real processes: the weights have one SHA-256 for any number of workers and any loss of them.

tests/faults/test_bitwise.py has hand-written loops."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.torch import progress, rank
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.injected_faults import inject_faults, kill
from tests.component.threads import run_task
from tests.component.torch.bitwise import BitwiseJob, everything, hash_state
from tests.component.torch.elastic_jobs import add_noise, compare_rows
from tests.component.torch.job import (
    CLASSES,
    WIDTH,
    Data,
    Follower,
    Job,
    LauncherFactory,
    make_data,
    sgd,
    train_elastic,
)
from tests.scenarios import Fault
from tests.worlds import run_in_world

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


# Class weights make the divisors of the steps' losses numbers that are not whole.
WEIGHTED = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.1, 0.3]))


@pytest.mark.parametrize(
    ("loss", "scope"),
    [pytest.param(WEIGHTED, None, marks=pytest.mark.faults), (compare_rows, "step")],
    ids=["each row", "rows compared"],
)
def test_the_estimators_weights_and_losses_have_the_same_bits_after_a_kill(
    loss: Any, scope: str | None, tmp_path: Path, fault: Fault
) -> None:
    """Of three workers of which one dies, as those of one process."""
    data = make_data(tmp_path)
    options: Any = {"gradient_clip_norm": 0.05, "epochs": 1, "loss_scope": scope}
    job = BitwiseJob(everything(), adam, loss, shape=(1, 6, 6), **options)
    make = LauncherFactory()

    def kill_one() -> None:
        fault(kill, make.made, max(make.made.slots()))

    with inject_faults(tmp_path / "faults", {"epoch 0": kill_one}):
        weights, result = train_elastic(job, *data, None, Follower(), make)
    assert result.worlds[0].size == 3
    assert len(result.worlds) > 1, "nobody was lost"
    history = json.loads(result.results[0])["history"]
    assert (hash_state(weights), history[0]["loss"].hex()) == train_alone(replace(job, workers=1), data)


def train_alone(job: Job, data: Data) -> tuple[str, str]:
    """In this process: the hash of the weights, and the loss."""
    task, threads = job.task(*data), torch.get_num_threads()
    try:
        (outcome,) = run_in_world(1, lambda group: run_task(task, group))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    history, model = json.loads(outcome.result)["history"], task._trainer.state.model
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return hash_state(weights | dict(model.named_buffers())), history[0]["loss"].hex()


# The rank, and the step in which a bit of its memory flips: the virtual share of that rank is checked there.
FAULTY, STEP = 1, 10


def flip(tensor: torch.Tensor) -> None:
    """Flip a bit of its first number."""
    tensor.detach().reshape(-1).view(torch.int64)[0] ^= 1 << 30


class Faulty(torch.nn.Sequential):
    """A net of which a bit flips once, in its weights, its outputs or one of its gradients. marker: a file that is made
    then."""

    def __init__(self, what: str, marker: Path) -> None:
        torch.manual_seed(1)
        super().__init__(torch.nn.Linear(WIDTH, 40), torch.nn.Tanh(), torch.nn.Linear(40, CLASSES))
        self.what, self.marker, self._is_broken = what, marker, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = progress()
        if here is not None and (here.epoch, here.step) == (0, STEP) and rank() == FAULTY:
            self._break_once()
        output: torch.Tensor = super().forward(x)
        if self._is_broken:
            self._is_broken = False
            flip(output)
        return output

    def _break_once(self) -> None:
        if self.what and not self.marker.exists():
            self.marker.touch()
            weight: Any = self[0].weight
            if self.what == "outputs":  # of this pass alone
                self._is_broken = True
            elif self.what == "weights":
                flip(weight)
            else:

                def corrupt(gradient: torch.Tensor) -> torch.Tensor:
                    hook.remove()
                    wrong = gradient.clone()
                    flip(wrong)
                    return wrong

                hook = weight.register_hook(corrupt)


@pytest.mark.parametrize(
    ("what", "transformation", "scope"),
    [
        ("gradients", add_noise, None),
        pytest.param("weights", None, None, marks=pytest.mark.faults),
        pytest.param("weights", None, "step", marks=pytest.mark.faults),
        pytest.param("outputs", None, "step", marks=pytest.mark.faults),
    ],
)
def test_a_flipped_bit_is_found_and_does_not_reach_the_weights(
    what: str, transformation: Any, scope: str | None, tmp_path: Path
) -> None:
    data, marker, follower = make_data(tmp_path), tmp_path / "flipped", Follower()
    options: Any = {"shares": 3, "verify_steps": 1, "transformation": transformation, "loss_scope": scope}
    job = Job(Faulty(what, marker).double(), sgd, torch.nn.CrossEntropyLoss(), epochs=1, **options)
    found, result = train_elastic(job, *data, None, follower, LauncherFactory())
    assert marker.exists()
    alone = replace(job, model=Faulty("", marker).double(), workers=1, batch_size=24, verify_steps=None)
    expected: dict[str, torch.Tensor] = {}

    def keep_weights(task: TorchTrainProgram) -> None:
        expected.update(copy.deepcopy(task._trainer.state.model.state_dict()))

    run_in_world(1, lambda group: run_task(alone.task(*data), group, keep_weights))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    (said, *_) = [line for line in follower.lines if f"step {STEP} of epoch 1 is taken again" in line]
    assert "silent corruption" in said
    assert f"rank {FAULTY} on host" in said
    assert "other bits than the 2 others" in said
    assert (len(result.worlds) > 1) == (what == "weights"), "a worker that is wrong again loses its place"
