"""P1, P2, P7 with all that hangs on a training: schedules, callbacks, an early end, metrics, validation, losses."""

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
from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.training.spec import Rows
from spark_elastic.training.torch.callbacks import Callback, Training
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.hooked_job import ForkingLoss, check_history, make_job, train_hooked_plain
from tests.component.torch.job import (
    CLASSES,
    ROWS,
    RUN,
    WIDTH,
    Follower,
    Job,
    LauncherFactory,
    SlowNet,
    check_every_row_once,
    difference,
    ledger_of,
    make_data,
    train_elastic,
    train_plain,
)
from tests.component.torch.nets import mlp, sgd
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]

LOST = [pytest.param("one", marks=pytest.mark.faults), "all"]


@pytest.mark.scenario("G5", "S7")
@pytest.mark.parametrize("lost", LOST)
def test_p2_p7_callbacks_see_the_state_of_an_undisturbed_run(lost: str, tmp_path: Path, fault: Fault) -> None:
    """One worker is lost in training and one in validation; or all, and training continues from a checkpoint."""
    (store, manifest), job, ledger = make_data(tmp_path), make_job(), tmp_path / "ledger"
    make = LauncherFactory()

    def inject_fault() -> None:
        for slot in sorted(make.made.slots())[: None if lost == "all" else 1]:
            fault(kill, make.made, slot)

    run = OwnedRun.acquire(store, RUN)
    places = ["epoch 1"] if lost == "all" else ["epoch 0", "validation 1"]
    with inject_faults(tmp_path / "faults", dict.fromkeys(places, inject_fault)):
        ours, result = train_elastic(
            job, store, manifest, str(ledger), Follower(), make, run=run, keep_commits=False
        )
    theirs, history = train_hooked_plain(job, store, manifest)
    assert len(result.worlds) > 1, "nobody was lost"
    resumed = ["continues from checkpoint" in world.reason for world in result.worlds]
    assert sum(resumed) == (lost == "all")
    check_every_row_once(ledger, job.epochs)
    assert difference(ours, theirs) < 1e-9
    check_history(result, history)


class SeenBuffers(Callback):
    """Logs what it sees of a buffer at the ends of steps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, training: Training, logs: Any) -> None:
        self.seen.append(float(training.model.get_buffer("net.1.running_mean").sum()))

    def on_epoch_end(self, training: Training, logs: Any) -> None:
        logs.update(seen=list(self.seen))


@dataclass(frozen=True)
class NormedJob(Job):
    def objects(self) -> TorchUserObjects:
        return replace(super().objects(), callbacks=(SeenBuffers(),))


def test_p4_callbacks_of_all_workers_see_the_same_buffers(tmp_path: Path) -> None:
    store, manifest = make_data(tmp_path)
    layers = torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, CLASSES)
    model = SlowNet(torch.nn.Sequential(*layers).double(), pace=0.0)
    job = NormedJob(model, sgd, torch.nn.CrossEntropyLoss(), epochs=1, workers=2, batch_size=50)
    _, result = train_elastic(job, store, manifest, None, Follower(), LauncherFactory(room=2))
    histories = [json.loads(text)["history"] for text in result.results]
    assert len(histories) == 2
    assert histories[0][0]["seen"] == histories[1][0]["seen"]
    assert len(set(histories[0][0]["seen"])) == 6


def test_a_process_forked_by_a_loss_function_sends_nothing_for_its_worker(tmp_path: Path) -> None:
    store, manifest = make_data(tmp_path)
    codes, follower = tmp_path / "codes", Follower()
    job = Job(mlp(), sgd, ForkingLoss(str(codes)), epochs=1, workers=2, batch_size=20)
    make = LauncherFactory(room=2)
    ours, result = train_elastic(job, store, manifest, None, follower, make, lease=30.0)
    assert len(result.worlds) == 1, result.worlds
    assert codes.read_text().split() == ["0", "1", "1"]
    said = "\n".join(follower.lines)
    assert "ValueError: of the fork" in said
    assert "a process that a worker's code forked (os.fork) called a collective" in said
    assert difference(ours, train_plain(job, store, manifest)) < 1e-9


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
        callbacks = (StopOnRankZero(self.marks),)
        objects = TorchUserObjects(self.model, self.optimizer, (self.loss,), callbacks=callbacks)
        return TorchTrainProgram(replace(task._spec, validation=seen), objects)


@pytest.mark.faults
def test_r06_an_early_end_of_an_epoch_survives_the_loss_of_the_rank_that_asked_for_it(tmp_path: Path) -> None:
    store, manifest = make_data(tmp_path)
    marks, ledger = tmp_path / "marks", tmp_path / "ledger"
    marks.mkdir()
    job = EndedJob(mlp(), sgd, torch.nn.CrossEntropyLoss(), epochs=3, marks=str(marks))
    ours, result = train_elastic(job, store, manifest, str(ledger), Follower(), LauncherFactory())
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
