"""Keras training on real processes: P1 to P4 under kills, P7 when all are lost, callbacks told each thing once."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.protocol.types import Limits
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.testing.fakes import ProcessLauncher
from tests.component.injected_faults import await_fault, inject_faults, kill
from tests.component.keras.job import JOBS, Job, difference, train_plain, weights_of
from tests.component.torch.job import ROWS, RUN, Follower, NoDiscovery, check_every_row_once, make_data
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [
    pytest.mark.native,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3 with numpy 2
]


class CallbackCheck(keras.callbacks.Callback):
    """Slows training down, so that a quick machine, too, is met in mid-epoch, and asserts that it is told all once."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.steps = 0, 0
        self.epochs: list[int] = []
        self.ended: list[int] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.begun += 1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.01)
        await_fault(self.epochs[-1], batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["loss"] > 0
        self.steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended.append(epoch)
        assert self.begun == 1
        assert self.ended == self.epochs == list(range(epoch + 1)), "each epoch is told once (W6)"
        assert self.steps == len(self.epochs) * self.params["steps"], "each step is told once (R1)"


def train(job: Job, tmp_path: Path, acts: Any) -> tuple[Any, Any]:
    """(store and manifest, the launch's result). acts: what befalls the launcher and the store, by place."""
    store, manifest = make_data(tmp_path)
    launcher = ProcessLauncher(
        job.task(store, manifest, str(tmp_path / "ledger")),
        SystemClock(),
        preload=("keras",),
        room=3,
        spare_after=3600.0,  # whole slots are killed, and a process that imports TensorFlow takes seconds
    )
    batch = job.batch_size * job.workers
    limits = Limits(job.workers, 1, job.workers, gather_timeout=60.0, lease=5.0, max_global_batch=batch)
    site, config = DriverOptions(run=OwnedRun.acquire(store, RUN)), ElasticConfig()
    with inject_faults(
        tmp_path / "faults", {place: partial(act, launcher, store) for place, act in acts.items()}
    ):
        result = supervise(launcher, NoDiscovery(), site, limits, config, "test", Follower())
    assert len({json.loads(text)["digest"] for text in result.results}) == 1, "replicas differ (P4)"
    check_every_row_once(tmp_path / "ledger", job.epochs)
    return (store, manifest), result


@pytest.mark.scenario("G1", "G2", "G3")
def test_p1_p2_p3_p4_hold_under_two_kills_with_rows_that_processes_augment(
    tmp_path: Path, fault: Fault
) -> None:
    """One slot in the first epoch, and rank 0's in the second."""
    killed: list[int] = []

    def add_noise(columns: dict[str, Any], rng: Any) -> dict[str, Any]:
        if rng is None:  # validation
            return columns
        return {**columns, "x": columns["x"] + rng.normal(scale=0.1, size=columns["x"].shape[1:])}

    def inject_fault(which: int, launcher: ProcessLauncher, store: Store) -> None:
        killed.append(sorted(launcher.slots())[which])
        fault(kill, launcher, killed[-1])

    job = replace(JOBS["row weights"], transformation=add_noise, callbacks=(CallbackCheck(),))
    data, result = train(
        job, tmp_path, {"epoch 0": partial(inject_fault, 1), "epoch 1": partial(inject_fault, 0)}
    )
    assert len(killed) == 2
    assert len(result.worlds) > 1, "nobody was lost"
    theirs, losses = train_plain(job, *data)
    assert difference(weights_of(data[0]), theirs) < 1e-9
    history = json.loads(result.results[0])["history"]
    assert [epoch["loss"] for epoch in history] == pytest.approx(losses, rel=1e-9)
    assert [epoch["val_rows"] for epoch in history] == [ROWS] * job.epochs


@pytest.mark.faults  # many processes import TensorFlow; tests/component/torch/test_training_hooks.py is in each build
@pytest.mark.scenario("G5")
def test_p7_all_workers_are_lost_and_training_continues_from_the_last_checkpoint(
    tmp_path: Path, fault: Fault
) -> None:
    killed: list[int] = []

    def inject_fault(launcher: ProcessLauncher, store: Store) -> None:
        until(CheckpointStore(store, RUN).read_published)
        for slot in launcher.slots():
            killed.append(slot)
            fault(kill, launcher, slot)

    job = replace(JOBS["two outputs"], checkpoint_steps=3, callbacks=(CallbackCheck(),))
    data, result = train(job, tmp_path, {"epoch 1": inject_fault})
    assert len(killed) == 3
    assert [w for w in result.worlds if "continues from checkpoint" in w.reason], (
        "nobody began from a checkpoint"
    )
    assert difference(weights_of(data[0]), train_plain(job, *data)[0]) < 1e-9
