"""The estimator's training on real processes: P1 to P4 under kills, with all that hangs on a training; P7."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import cloudpickle
import pytest
import torch

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoint import CheckpointStore, OwnedRun
from spark_elastic.runs.kept_commits import KeptCommits
from spark_elastic.torch import progress, rank
from spark_elastic.training.spec import Rows
from spark_elastic.training.step_commits import LONGEST
from spark_elastic.training.torch.callbacks import Callback, Training
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.elastic_jobs import (
    JOBS,
    TOGETHER,
    ForkingLoss,
    check_history,
    make_hooked_job,
    train_hooked_plain,
)
from tests.component.torch.job import (
    CLASSES,
    DRIVER,
    ROWS,
    RUN,
    WIDTH,
    Data,
    Follower,
    Job,
    LauncherFactory,
    check_every_row_once,
    check_every_row_once_by_attempt,
    difference,
    ledger_of,
    make_data,
    make_job,
    measure_repeated_work,
    mlp,
    sgd,
    train_and_check,
    train_elastic,
    train_plain,
)
from tests.devices import ACCELERATORS
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]


@pytest.mark.scenario("G1", "G2", "G3")
@pytest.mark.parametrize(
    # The others say which part is wrong where all at once are.
    "name",
    [pytest.param(name, marks=[pytest.mark.faults] * (name != TOGETHER)) for name in JOBS],
)
def test_p1_p2_p3_p4_hold_under_two_kills(name: str, data: Data, tmp_path: Path, fault: Fault) -> None:
    kill_two(JOBS[name], data, tmp_path, fault, "cpu")


@pytest.mark.parametrize("device", ACCELERATORS, indirect=True)
def test_p1_p2_p3_p4_hold_on_a_device(device: str, data: Data, tmp_path: Path, fault: Fault) -> None:
    kill_two(JOBS[TOGETHER], data, tmp_path, fault, device)


def kill_two(job: Job, data: Data, tmp_path: Path, fault: Fault, device: str) -> None:
    make = LauncherFactory(device=device)
    killed: list[int] = []

    def inject_fault(which: int) -> None:
        killed.append(sorted(make.made.slots())[which])
        fault(kill, make.made, killed[-1])

    # One slot in the first epoch, and rank 0's in the second.
    acts = {"epoch 0": lambda: inject_fault(1), "epoch 1": lambda: inject_fault(0)}
    with inject_faults(tmp_path / "faults", acts):
        result = train_and_check(job, data, tmp_path, make)
    assert len(killed) == 2
    assert len(result.worlds) > 1, "nobody was lost"


LOST = [pytest.param("one", marks=pytest.mark.faults), "all"]


@pytest.mark.scenario("G5", "S7")
@pytest.mark.parametrize("lost", LOST)
def test_p2_p7_callbacks_see_the_state_of_an_undisturbed_run(lost: str, tmp_path: Path, fault: Fault) -> None:
    """One worker is lost in training and one in validation; or all, and training continues from a checkpoint."""
    (store, manifest), job, ledger = make_data(tmp_path), make_hooked_job(), tmp_path / "ledger"
    make = LauncherFactory()

    def inject_fault() -> None:
        for slot in sorted(make.made.slots())[: None if lost == "all" else 1]:
            fault(kill, make.made, slot)

    run = OwnedRun.acquire(store, RUN)
    places = ["epoch 1"] if lost == "all" else ["epoch 0", "validation 1"]
    with inject_faults(tmp_path / "faults", dict.fromkeys(places, inject_fault)):
        given: Any = {"run": run, "keep_commits": False}
        ours, result = train_elastic(job, store, manifest, str(ledger), Follower(), make, **given)
    theirs, history = train_hooked_plain(job, store, manifest)
    assert len(result.worlds) > 1, "nobody was lost"
    resumed = ["continues from checkpoint" in world.reason for world in result.worlds]
    assert sum(resumed) == (lost == "all")
    check_every_row_once(ledger, job.epochs)
    assert difference(ours, theirs) < 1e-9
    check_history(result, history)


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


SLOW = 1  # the rank that takes six times as long for a row
EQUAL = 8  # rows of a rank in an equal division


class PacedByRows(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if progress() is not None:
            time.sleep(len(x) * (0.024 if rank() == SLOW else 0.004))
        output: torch.Tensor = super().forward(x)
        return output


def build(kind: Callable[..., torch.nn.Module] = PacedByRows) -> torch.nn.Module:
    torch.manual_seed(1)
    layers = (torch.nn.Linear(WIDTH, 40), torch.nn.Tanh(), torch.nn.Linear(40, CLASSES))
    return kind(*layers).double()


class HasAHopelessWorker(torch.nn.Sequential):
    """The first process that has the rank SLOW takes as long for a row as for many, whatever rank it gets later."""

    def __init__(self, *layers: torch.nn.Module, mark: Path) -> None:
        super().__init__(*layers)
        self.mark = mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if progress() is not None:
            if rank() == SLOW and not self.mark.exists():
                self.mark.write_text(str(os.getpid()))
            time.sleep(0.15 if self.mark.exists() and self.mark.read_text() == str(os.getpid()) else 0.01)
        output: torch.Tensor = super().forward(x)
        return output


JOB = Job(build(), sgd, torch.nn.CrossEntropyLoss(), batch_size=EQUAL, workers=2, balance_rows=True)


def mean_rows(ledger: Path, epoch: int) -> dict[int, float]:
    """The mean rows of a step in an epoch, by process."""
    rows: dict[int, list[int]] = {}
    for path in ledger.glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["event"] == "contributes" and line["epoch"] == epoch:
                rows.setdefault(line["pid"], []).append(len(line["rows"]))
    return {pid: mean(counts) for pid, counts in rows.items()}


@pytest.mark.parametrize("shares", [0, pytest.param(8, marks=pytest.mark.faults)])
def test_p1_p2_a_slow_worker_gets_fewer_rows_and_nothing_else_changes(shares: int, tmp_path: Path) -> None:
    job, data, follower = replace(JOB, shares=shares), make_data(tmp_path), Follower()
    result = train_and_check(job, data, tmp_path, LauncherFactory(room=2), follower)
    assert [world.size for world in result.worlds] == [2]
    slow, fast = sorted(mean_rows(tmp_path / "ledger", epoch=1).values())
    assert slow < 0.7 * EQUAL
    assert fast > EQUAL
    assert any("from now on, by their speed" in line for line in follower.lines)


@pytest.mark.faults  # twenty windows of half a second pass before a worker counts as hopeless
def test_p1_p2_a_worker_that_stays_slow_whatever_it_is_given_is_exchanged(tmp_path: Path) -> None:
    model = build(partial(HasAHopelessWorker, mark=tmp_path / "slow"))
    job, ledger = replace(JOB, model=model, workers=3, epochs=8), tmp_path / "ledger"
    result = train_and_check(job, make_data(tmp_path), tmp_path, LauncherFactory(spares=True))
    assert [world.size for world in result.worlds] == [3, 2, 3]
    slow = int((tmp_path / "slow").read_text())
    assert slow in mean_rows(ledger, epoch=1)
    assert slow not in mean_rows(ledger, epoch=job.epochs - 1)


SEEDS = [None, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(20))]


def is_epoch_durable(store: Store, epoch: int) -> bool:
    """Whether a checkpoint of that epoch counts."""
    return any(each.position.epoch == epoch for each in CheckpointStore(store, RUN).read_published())


def is_kept_beyond_checkpoints(store: Store) -> bool:
    """Whether this host keeps a newer state of the run than the store has."""
    kept = KeptCommits(OwnedRun(store, RUN, 0, ()).load_commit_key()).find_newest()
    return kept is not None and all(
        kept.position > each.position for each in CheckpointStore(store, RUN).read_published()
    )


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10))
def test_p7_a_fit_continues_after_the_loss_of_all_workers(data: Data, tmp_path: Path, seed: int) -> None:
    """Twice: at a step of the seed's, and then some way into the next exchange, commit or checkpoint."""
    draw = random.Random(seed)
    job, (store, manifest) = make_job(), data
    steps = [draw.randrange(5, 13), draw.randrange(15, 26)]
    make = LauncherFactory(room=job.workers)
    struck: list[threading.Thread] = []

    def kill_all() -> None:
        time.sleep(draw.uniform(0.0, 0.3))
        for slot in make.made.slots():
            make.made.kill(slot)

    def start_kill(epoch: int, step: int) -> None:
        if len(struck) < len(steps) and epoch * job.plan(manifest).steps + step >= steps[len(struck)]:
            struck.append(threading.Thread(target=kill_all))
            struck[-1].start()

    run, follower = OwnedRun.acquire(store, RUN), Follower(start_kill)
    result = train_and_check(job, data, tmp_path, make, follower, run=run, keep_commits=False)
    for thread in struck:
        thread.join()
    assert len(struck) == len(steps)
    assert any("continues from checkpoint" in world.reason for world in result.worlds)


@pytest.mark.scenario("G6", "G18")
@pytest.mark.parametrize("seed", SEEDS)
def test_p7_another_driver_resumes_a_run(data: Data, tmp_path: Path, fault: Fault, seed: int | None) -> None:
    """In the second epoch; or at a moment of the seed's. The run continues at the step, which hosts have kept."""
    draw = random.Random(seed)
    job, (store, manifest) = make_job(), data
    ledger = tmp_path / "ledger"

    def kill_driver() -> None:
        until(lambda: is_kept_beyond_checkpoints(store))  # on a busy machine not every step is kept: R23
        fault(first.kill)

    def inject_fault() -> None:
        until(lambda: is_epoch_durable(store, 1))
        kill_driver()

    with inject_faults(tmp_path / "faults", {"epoch 1": inject_fault} if seed is None else {}):
        first = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=os.getcwd())
        try:
            if seed is not None:
                until(CheckpointStore(store, RUN).read_published, 240)
                time.sleep(draw.uniform(0.0, 1.0))
                kill_driver()
            first.wait(150)
        finally:
            first.kill()
            first.wait(60)
    run = OwnedRun.acquire(store, RUN)
    workers = 2 if seed is None else draw.choice([1, 2, 3])
    other = replace(job, workers=workers, batch_size=job.batch_size * job.workers // workers)
    assert other.plan(manifest) == job.plan(manifest)
    make = LauncherFactory(workers)
    ours, result = train_elastic(other, *data, str(ledger), Follower(), make, run=run)
    assert run.attempt == 2
    assert "as a host's memory has kept it" in result.worlds[0].reason
    assert measure_repeated_work(ledger) < LONGEST
    assert not KeptCommits(run.load_commit_key()).list_keepers(), "a keeper outlived the success"
    assert first.returncode == -signal.SIGKILL
    assert difference(ours, train_plain(job, store, manifest)) < 1e-9
    check_every_row_once_by_attempt(ledger, job.epochs)
