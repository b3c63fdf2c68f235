"""P7 on real processes: what is durable outlives all workers, and the driver too, killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.runs.kept_commits import KeptCommits
from spark_elastic.runs.owned_run import OwnedRun
from tests.component.injected_faults import inject_faults
from tests.component.torch.job import (
    RUN,
    Follower,
    LauncherFactory,
    check_every_row_once,
    difference,
    launcher,
    make_data,
    train_elastic,
    train_plain,
)
from tests.component.torch.resumed_job import (
    DRIVER,
    check_every_row_once_by_attempt,
    count_repeated_steps,
    make_job,
)
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

SEEDS = [None, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(20))]


@pytest.fixture
def data(tmp_path: Path) -> tuple[Store, Manifest]:
    return make_data(tmp_path)


def is_epoch_durable(store: Store, epoch: int) -> bool:
    """Whether a checkpoint of that epoch counts."""
    return any(each.position.epoch == epoch for each in CheckpointStore(store, RUN).read_published())


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10))
def test_p7_a_fit_continues_after_all_workers_are_killed_at_random_moments(
    data: tuple[Store, Manifest], tmp_path: Path, seed: int
) -> None:
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

    ledger, run, follower = tmp_path / "ledger", OwnedRun.acquire(store, RUN), Follower(start_kill)
    ours, result = train_elastic(job, *data, str(ledger), follower, make, run=run, keep_commits=False)
    for thread in struck:
        thread.join()
    assert len(struck) == len(steps)
    assert any("continues from checkpoint" in world.reason for world in result.worlds)
    assert difference(ours, train_plain(job, store, manifest)) < 1e-9
    check_every_row_once(ledger, job.epochs)


@pytest.mark.scenario("G6", "G18")
@pytest.mark.parametrize("seed", SEEDS)
def test_p7_another_driver_resumes_with_other_workers_after_a_kill(
    data: tuple[Store, Manifest], tmp_path: Path, fault: Fault, seed: int | None
) -> None:
    """In the second epoch; or at a moment of the seed's. The run continues at the step, which hosts have kept."""
    draw = random.Random(seed)
    job, (store, manifest) = make_job(), data
    ledger = tmp_path / "ledger"

    def inject_fault() -> None:
        until(lambda: is_epoch_durable(store, 1))
        fault(first.kill)

    with inject_faults(tmp_path / "faults", {"epoch 1": inject_fault} if seed is None else {}):
        first = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=os.getcwd())
        try:
            if seed is not None:
                until(CheckpointStore(store, RUN).read_published, 240)
                time.sleep(draw.uniform(0.0, 1.0))
                fault(first.kill)
            first.wait(150)
        finally:
            first.kill()
            first.wait(60)
    run = OwnedRun.acquire(store, RUN)
    workers = 2 if seed is None else draw.choice([1, 2, 3])
    other = replace(job, workers=workers, batch_size=job.batch_size * job.workers // workers)
    assert other.plan(manifest) == job.plan(manifest)
    ours, result = train_elastic(
        other, store, manifest, str(ledger), Follower(), lambda task: launcher(task, room=workers), run=run
    )
    assert run.attempt == 2
    assert "as a host's memory has kept it" in result.worlds[0].reason
    assert count_repeated_steps(ledger) <= 1
    assert not KeptCommits(run.load_commit_key()).list_keepers(), "a keeper outlived the success"
    assert first.returncode == -signal.SIGKILL
    assert difference(ours, train_plain(job, store, manifest)) < 1e-9
    check_every_row_once_by_attempt(ledger, job.epochs)


@pytest.mark.faults
def test_r23_a_driver_that_was_stopped_returns_and_finds_out_at_once_that_another_one_holds_the_run(
    data: tuple[Store, Manifest], tmp_path: Path
) -> None:
    """Its workers train on meanwhile, and keep commits: they change nothing."""
    job, (store, manifest), ledger = make_job(), data, tmp_path / "ledger"

    def stop_driver() -> None:
        until(lambda: is_epoch_durable(store, 1))
        first.send_signal(signal.SIGSTOP)

    def return_driver(epoch: int, step: int) -> None:
        first.send_signal(signal.SIGCONT)

    with inject_faults(tmp_path / "faults", {"epoch 1": stop_driver}):
        command = [sys.executable, "-c", DRIVER, str(tmp_path)]
        first = subprocess.Popen(command, cwd=os.getcwd(), stderr=subprocess.PIPE, text=True)
        until(lambda: not (tmp_path / "faults" / "epoch 1").exists())
    try:
        run, follower = OwnedRun.acquire(store, RUN), Follower(return_driver)
        other = replace(job, workers=2, batch_size=job.batch_size * job.workers // 2)
        ours, result = train_elastic(
            other, store, manifest, str(ledger), follower, lambda task: launcher(task, room=2), run=run
        )
        _, said = first.communicate(timeout=60)
    finally:
        first.kill()
        first.communicate()
    assert "as a host's memory has kept it" in result.worlds[0].reason
    assert first.returncode == 1
    assert "was taken over by another driver (attempt 2" in said
    assert difference(ours, train_plain(job, store, manifest)) < 1e-9
    check_every_row_once_by_attempt(ledger, job.epochs)
    until(lambda: not KeptCommits(run.load_commit_key()).list_keepers())
