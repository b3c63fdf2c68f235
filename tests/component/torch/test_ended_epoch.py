"""R6: a callback ends the training within an epoch, while workers die around that very step."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.training.spec import Rows
from spark_elastic.training.torch.callbacks import Callback, Training
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.torch.job import (
    ROWS,
    Follower,
    Job,
    difference,
    launcher,
    ledger_of,
    make_data,
    train_elastic,
    train_plain,
)
from tests.component.torch.nets import mlp, sgd

pytestmark = [pytest.mark.native, pytest.mark.faults, pytest.mark.timeout(180)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LAST = 6  # the step of the second epoch that is the training's last


class StopOnRankZero(Callback):
    """Rank 0 alone asks for the end; rank 1 dies in that step, and the rank 0 that asked where it closes the epoch."""

    def __init__(self, marks: str) -> None:
        self._marks = Path(marks)

    def on_step_begin(self, training: Training, epoch: int, step: int) -> None:
        if (epoch, step) == (1, LAST):
            if training.rank == 0:
                training.stop("enough")
            if training.rank == 1:
                self._die_once("in the step")

    def on_epoch_end(self, training: Training, logs: Any) -> None:
        if logs["epoch"] == 1 and training.rank == 0:
            self._die_once("behind it")

    def _die_once(self, where: str) -> None:
        try:
            (self._marks / where).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class EndedJob(Job):
    marks: str = ""

    def task(self, store: Store, manifest: Manifest, ledger: str | None = None) -> TorchTrainProgram:
        task = super().task(store, manifest, ledger)
        seen = Rows(store, manifest, replace(self.plan(manifest), shuffle=False))
        objects = TorchUserObjects(
            self.model, self.optimizer, (self.loss,), callbacks=(StopOnRankZero(self.marks),)
        )
        return TorchTrainProgram(replace(task._spec, validation=seen), objects)


def test_r06_an_early_end_of_an_epoch_survives_the_loss_of_the_rank_that_asked_for_it(tmp_path: Path) -> None:
    store, manifest = make_data(tmp_path)
    marks, ledger = tmp_path / "marks", tmp_path / "ledger"
    marks.mkdir()
    job = EndedJob(mlp(), sgd, torch.nn.CrossEntropyLoss(), epochs=3, marks=str(marks))
    ours, result = train_elastic(
        job, store, manifest, str(ledger), Follower(), lambda task: launcher(task, room=3)
    )
    assert {mark.name for mark in marks.iterdir()} == {"in the step", "behind it"}
    plan = job.plan(manifest)
    history = json.loads(result.results[0])["history"]
    due = plan.count_rows_before(LAST + 1)
    assert [(entry["rows"], entry["planned"]) for entry in history] == [(ROWS, ROWS), (due, due)]
    assert [entry["val_rows"] for entry in history] == [ROWS, ROWS]
    seen = ledger_of(ledger)
    assert sum(epoch == 1 for epoch, _ in seen) == due
    assert set(seen.values()) == {1}
    assert difference(ours, train_plain(job, store, manifest, plan.steps + LAST + 1)) < 1e-9
