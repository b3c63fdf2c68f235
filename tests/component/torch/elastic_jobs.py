"""Trainings of several nets and losses, which stand still where a test plans a fault."""

from __future__ import annotations

from typing import Any

import torch

from spark_elastic.torch import RowDropout, SyncBatchNorm
from spark_elastic.training.transformation import RowRandom
from tests.component.torch.job import CLASSES, WIDTH, Job
from tests.component.torch.nets import add_pace, mlp, sgd


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
        SyncBatchNorm(20, eps=1.0),  # with a small one, two nearly equal rows would amplify rounding
        torch.nn.Tanh(),
        RowDropout(0.3),
        torch.nn.Linear(20, CLASSES),
    )


def compare_rows(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A contrastive loss: rows of one class are to be nearest to each other."""
    unit = torch.nn.functional.normalize(output)
    others = 1.0 - torch.eye(len(label), device=label.device)
    near = (unit @ unit.T / 0.2 - 1e9 * (1.0 - others)).log_softmax(1)
    same = (label[:, None] == label) * others
    return -(near * same).sum() / same.sum().clamp(min=1.0)


def add_noise(columns: dict[str, Any], rng: RowRandom | None) -> dict[str, Any]:
    """In training."""
    x = columns["x"]
    return columns if rng is None else {**columns, "x": x + rng.normal(size=x.shape[1:])}


def augment(columns: dict[str, Any], rng: RowRandom | None) -> dict[str, Any]:
    """Make noisy pictures, of no rows, too."""
    x = columns["x"].reshape(len(columns["x"]), 1, 6, 6)
    return add_noise({**columns, "x": x}, rng)


TOGETHER = "all at once"

JOBS = {
    TOGETHER: Job(
        build_mixed(),
        adam,
        torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)),
        shape=(1, 6, 6),
        gradient_clip_norm=0.05,
        batch_size=9,
        global_batch=26,  # the last step of an epoch has two rows, for three ranks
        transformation=augment,
        transformation_workers=1,
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
    "rows of a step compared": Job(build_row_dropout(), adam, compare_rows, loss_scope="step"),
    "row weights": Job(mlp(), adam, torch.nn.CrossEntropyLoss(), weight="w"),
}
