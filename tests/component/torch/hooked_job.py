"""A job with everything that hangs on a training, and the plain loop that it must agree with."""

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
from spark_elastic.torch import progress
from spark_elastic.training.spec import Rows
from spark_elastic.training.torch.callbacks import Callback, LearningRateSchedule
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.torch.job import CLASSES, ROWS, WIDTH, Job, SlowNet
from tests.fit_configs import change
from tests.planned_rows import list_row_ids

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


def sgd(parameters: Any) -> torch.optim.Optimizer:
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


def make_job() -> HookedJob:
    torch.manual_seed(4)
    return HookedJob(SlowNet(TwoHeads()).double(), sgd, None, checkpoint_steps=3)


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
