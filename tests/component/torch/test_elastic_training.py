"""The estimator's training on real processes: P1, P2, P3 and P4, undisturbed and under kills, for several nets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.torch import RowDropout, SyncBatchNorm
from spark_elastic.torch.train.trainer import TorchTrainProgram
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.job import (
    CLASSES,
    ROWS,
    WIDTH,
    Follower,
    Job,
    difference,
    launcher,
    ledger_of,
    make_data,
    train_elastic,
    train_plain,
)
from tests.component.torch.nets import add_pace, mlp, sgd
from tests.devices import DEVICES
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]


def build_conv() -> torch.nn.Module:
    torch.manual_seed(2)
    return add_pace(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * WIDTH, CLASSES),
    )


def build_sync_batch_norm() -> torch.nn.Module:
    """Statistics of the whole step's rows: replaced by plain BatchNorm where one process has them all."""
    torch.manual_seed(4)
    return add_pace(
        torch.nn.Linear(WIDTH, 20), SyncBatchNorm(20), torch.nn.Tanh(), torch.nn.Linear(20, CLASSES)
    )


def build_row_dropout() -> torch.nn.Module:
    torch.manual_seed(5)
    return add_pace(
        torch.nn.Linear(WIDTH, 20),
        RowDropout(0.3),
        torch.nn.Tanh(),
        RowDropout(0.2),
        torch.nn.Linear(20, CLASSES),
    )


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def build_mixed() -> torch.nn.Module:
    """A layer of each kind that the others have one of."""
    torch.manual_seed(6)
    return add_pace(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * WIDTH, 20),
        SyncBatchNorm(20),
        torch.nn.Tanh(),
        RowDropout(0.3),
        torch.nn.Linear(20, CLASSES),
    )


TOGETHER = "all at once"

JOBS = {
    TOGETHER: Job(
        build_mixed(),
        adam,
        torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)),
        shape=(1, 6, 6),
        gradient_clip_norm=0.05,
    ),
    "mlp": Job(mlp(), sgd, torch.nn.CrossEntropyLoss()),
    "conv": Job(build_conv(), adam, torch.nn.CrossEntropyLoss(), shape=(1, 6, 6)),
    "class weights, clipped": Job(
        mlp(),
        sgd,
        torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)),
        gradient_clip_norm=0.05,
    ),
    "statistics of all ranks": Job(build_sync_batch_norm(), sgd, torch.nn.CrossEntropyLoss()),
    "dropout by rows": Job(build_row_dropout(), sgd, torch.nn.CrossEntropyLoss()),
    "row weights": Job(mlp(), adam, torch.nn.CrossEntropyLoss(), weight="w"),
}


@pytest.fixture
def data(tmp_path: Path) -> tuple[Store, Manifest]:
    return make_data(tmp_path)


def test_p2_undisturbed_training_equals_a_plain_loop(data: tuple[Store, Manifest]) -> None:
    """Two workers and one net: the kills below cover the others, and a start of processes is what takes the time."""
    job = replace(JOBS["class weights, clipped"], workers=2, epochs=1)
    ours, result = train_elastic(job, *data, None, Follower(), lambda task: launcher(task, room=2))
    assert [world.size for world in result.worlds] == [2]
    assert difference(ours, train_plain(job, *data)) < 1e-9


@pytest.mark.scenario("G1", "G2", "G3")
@pytest.mark.parametrize(
    # The others say which part is wrong where all at once are.
    "name",
    [pytest.param(name, marks=[pytest.mark.faults] * (name != TOGETHER)) for name in JOBS],
)
def test_p1_p2_p3_p4_hold_under_two_kills(
    name: str, data: tuple[Store, Manifest], tmp_path: Path, fault: Fault
) -> None:
    kill_two(JOBS[name], data, tmp_path, fault, "cpu")


@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
def test_p1_p2_p3_p4_hold_under_two_kills_on_a_device(
    device: str, data: tuple[Store, Manifest], tmp_path: Path, fault: Fault
) -> None:
    kill_two(JOBS[TOGETHER], data, tmp_path, fault, device)


def kill_two(job: Job, data: tuple[Store, Manifest], tmp_path: Path, fault: Fault, device: str) -> None:
    made: list[ProcessLauncher] = []
    killed: list[int] = []

    def make(task: TorchTrainProgram) -> ProcessLauncher:
        made.append(launcher(task, room=3, device=device))
        return made[0]

    def inject_fault(which: int) -> None:
        killed.append(sorted(made[0].slots())[which])
        fault(kill, made[0], killed[-1])

    ledger = tmp_path / "ledger"
    # One slot in the first epoch, and rank 0's in the second.
    with inject_faults(
        tmp_path / "faults", {"epoch 0": lambda: inject_fault(1), "epoch 1": lambda: inject_fault(0)}
    ):
        ours, result = train_elastic(job, *data, str(ledger), Follower(), make)
    assert len(killed) == 2
    assert len(result.worlds) > 1, "nobody was lost"
    assert difference(ours, train_plain(job, *data)) < 1e-9
    seen = ledger_of(ledger)
    assert set(seen) == {(epoch, row) for epoch in range(job.epochs) for row in range(ROWS)}
    assert set(seen.values()) == {1}
