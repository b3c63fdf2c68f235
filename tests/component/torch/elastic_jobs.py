"""Trainings of several nets and losses, which stand still where a test plans a fault, and one with all that hangs on
a training: schedules, callbacks, metrics, validation."""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.parquet as pq
import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.data.transformation import RowRandom
from spark_elastic.torch import RowDropout, SyncBatchNorm, progress
from spark_elastic.training.spec import Rows
from spark_elastic.training.torch.callbacks import Callback, LearningRateSchedule
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.torch.job import CLASSES, ROWS, WIDTH, Job, SlowNet, add_pace, mlp, sgd
from tests.fit_configs import change
from tests.planned_rows import list_row_ids


def build_conv() -> torch.nn.Module:
    torch.manual_seed(2)
    first, last = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Linear(4 * WIDTH, CLASSES)
    return add_pace(first, torch.nn.Tanh(), torch.nn.Flatten(), last)


def build_sync_batch_norm() -> torch.nn.Module:
    """Statistics of the whole step's rows: replaced by plain BatchNorm where one process has them all."""
    torch.manual_seed(4)
    first, last = torch.nn.Linear(WIDTH, 20), torch.nn.Linear(20, CLASSES)
    return add_pace(first, SyncBatchNorm(20), torch.nn.Tanh(), last)


def build_row_dropout() -> torch.nn.Module:
    torch.manual_seed(5)
    first, last = torch.nn.Linear(WIDTH, 20), torch.nn.Linear(20, CLASSES)
    return add_pace(first, RowDropout(0.3), torch.nn.Tanh(), RowDropout(0.2), last)


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


cloudpickle.register_pickle_by_value(sys.modules[__name__])
DECAY = 0.8
CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(WIDTH, 20)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(20, CLASSES), torch.nn.Linear(20, 1)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.heads[0](hidden), self.heads[1](hidden)[:, 0]


class ForkingLoss:
    """A loss that forks a process in three steps of rank 0: one exits, one raises, and one goes on as its parent does.

    codes: file of their exit codes.
    """

    def __init__(self, codes: str) -> None:
        self.codes = codes

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        here = progress()
        if here is not None and hvd.rank() == 0 and here.epoch == 0 and 1 <= here.step <= 3:
            forked = os.fork()
            if forked == 0 and here.step == 1:
                sys.exit(0)
            if forked == 0 and here.step == 2:
                raise ValueError("of the fork")
            if forked:
                code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
                with Path(self.codes).open("a") as file:
                    file.write(f"{code}\n")
        return torch.nn.functional.cross_entropy(output, label)


class CountingCallback(Callback):
    """Rows and losses of the steps that it is told of."""

    def __init__(self) -> None:
        self.steps, self.rows, self.losses = 0, 0, 0.0

    def on_step_end(self, training: Any, logs: Any) -> None:
        self.steps += 1
        self.rows += logs["rows"]
        self.losses += logs["loss"]

    def on_epoch_end(self, training: Any, logs: Any) -> None:
        logs.update(counted=[self.steps, self.rows, self.losses])


class DecayingRate(Callback):
    """Lowers the rate once in each epoch, however many worlds take its steps."""

    def on_epoch_begin(self, training: Any, epoch: int) -> None:
        training.learning_rate *= DECAY


def per_step(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


def fast_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_optimizer_at_half_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def score_hits(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output.argmax(1) if output.ndim == 2 else output.round()) == label).double().mean()


@dataclass(frozen=True)
class HookedJob(Job):
    def task(self, store: Store, manifest: Manifest, ledger: str | None = None) -> TorchTrainProgram:
        spec = super().task(store, manifest, ledger)._spec
        seen = Rows(store, manifest, replace(self.plan(manifest), shuffle=False))
        objects = TorchUserObjects(
            copy.deepcopy(self.model),
            make_optimizer_at_half_rate,  # and `lr_scale` makes it the job's own, once, whatever worlds come
            losses(),
            (1.0, 0.25),
            {"hits": score_hits},
            (CountingCallback(), DecayingRate(), LearningRateSchedule(per_step, every="step")),
        )
        config = change(spec.config, label_cols=("y", "w"))
        return TorchTrainProgram(replace(spec, config=config, validation=seen, lr_scale=2), objects)


def losses() -> tuple[torch.nn.Module, ...]:
    """The first one divides by the weights of a step's classes, which no rank knows alone."""
    return torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), torch.nn.MSELoss()


def make_hooked_job() -> HookedJob:
    torch.manual_seed(4)
    return HookedJob(SlowNet(TwoHeads()).double(), fast_sgd, None, checkpoint_steps=3)


def train_hooked_plain(
    job: Job, store: Store, manifest: Manifest
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights and history of one process over the same plan."""
    table = pq.read_table(store.path("rows/part.parquet"))
    x, w = (torch.tensor(table[name].to_pylist(), dtype=torch.float64) for name in ("x", "w"))
    y = torch.tensor(table["y"].to_pylist())
    model = copy.deepcopy(job.model).train()
    optimizer = job.optimizer(model.parameters())
    schedule, plan, history, (first, second) = per_step(optimizer), job.plan(manifest), [], losses()
    steps, rows_seen, losses_seen = 0, 0, 0.0
    for epoch in range(job.epochs):
        optimizer.param_groups[0]["lr"] *= DECAY
        for step in range(plan.steps):
            rows = torch.from_numpy(list_row_ids(plan, epoch, step))
            optimizer.zero_grad()
            left, right = model(x[rows])
            loss = first(left, y[rows]) + 0.25 * second(right, w[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
            steps += 1
            rows_seen += len(rows)
            losses_seen += float(loss.detach())
        with torch.no_grad():
            left, right = model(x)
        history.append({"val_hits_y": float(score_hits(left, y)), "counted": [steps, rows_seen, losses_seen]})
    return model.state_dict(), history


def check_history(result: Any, expected: list[dict[str, Any]]) -> None:
    history = json.loads(result.results[0])["history"]
    assert [epoch["val_rows"] for epoch in history] == [ROWS] * len(expected)
    assert [epoch["rows"] for epoch in history] == [ROWS] * len(expected)
    for ours, theirs in zip(history, expected, strict=True):
        assert ours["val_hits_y"] == pytest.approx(theirs["val_hits_y"], abs=1e-12)
        assert ours["counted"] == pytest.approx(theirs["counted"], rel=1e-9)
