"""Bits that flip in the memory of a worker: the step is not applied, the worker is named, and may lose its place."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.torch import progress, rank
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.threads import run_task
from tests.component.torch.elastic_jobs import add_noise
from tests.component.torch.job import CLASSES, WIDTH, Follower, Job, launcher, make_data, train_elastic
from tests.component.torch.nets import sgd
from tests.unit.torch.worlds import run_in_world

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

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


def make(task: TorchTrainProgram) -> ProcessLauncher:
    return launcher(task, room=3)


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
    job = Job(
        Faulty(what, marker).double(),
        sgd,
        torch.nn.CrossEntropyLoss(),
        epochs=1,
        shares=3,
        verify_steps=1,
        transformation=transformation,
        loss_scope=scope,
    )
    found, result = train_elastic(job, *data, None, follower, make)
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
