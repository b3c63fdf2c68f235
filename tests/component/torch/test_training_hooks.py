"""P1, P2 and P7 with everything that hangs on a training: schedules, callbacks, metrics, validation, several losses."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.training.torch.callbacks import Callback, Training
from spark_elastic.training.torch.spec import TorchUserObjects
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.hooked_job import ForkingLoss, check_history, make_job, train_hooked_plain
from tests.component.torch.job import (
    CLASSES,
    RUN,
    WIDTH,
    Follower,
    Job,
    LauncherFactory,
    SlowNet,
    check_every_row_once,
    difference,
    launcher,
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
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    layers = torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, CLASSES)
    model = SlowNet(torch.nn.Sequential(*layers).double(), pace=0.0)
    job = NormedJob(model, sgd, torch.nn.CrossEntropyLoss(), epochs=1, workers=2, batch_size=50)
    _, result = train_elastic(job, store, manifest, None, Follower(), lambda task: launcher(task, room=2))
    histories = [json.loads(text)["history"] for text in result.results]
    assert len(histories) == 2
    assert histories[0][0]["seen"] == histories[1][0]["seen"]
    assert len(set(histories[0][0]["seen"])) == 6


def test_a_process_forked_by_a_loss_function_sends_nothing_for_its_worker(tmp_path: Path) -> None:
    store, manifest = make_data(tmp_path)
    codes, follower = tmp_path / "codes", Follower()
    job = Job(mlp(), sgd, ForkingLoss(str(codes)), epochs=1, workers=2, batch_size=20)
    ours, result = train_elastic(
        job, store, manifest, None, follower, lambda task: launcher(task, room=2), lease=30.0
    )
    assert len(result.worlds) == 1, result.worlds
    assert codes.read_text().split() == ["0", "1", "1"]
    said = "\n".join(follower.lines)
    assert "ValueError: of the fork" in said
    assert "a process that a worker's code forked (os.fork) called a collective" in said
    assert difference(ours, train_plain(job, store, manifest)) < 1e-9
