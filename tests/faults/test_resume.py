"""P7 under twenty random kills: everything dies at a moment of the seed's, and another driver ends the run."""

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

from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.worker.program import Program
from tests.component.torch.job import (
    RUN,
    Follower,
    difference,
    launcher,
    make_data,
    train_elastic,
    train_plain,
)
from tests.component.torch.resumed_job import (
    DRIVER,
    check_every_row_once,
    check_every_row_once_by_attempt,
    make_job,
)

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", range(20))
def test_p7_a_fit_resumes_after_all_processes_are_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    job, (store, manifest) = make_job(), make_data(tmp_path)
    whole = job.batch_size * job.workers
    first = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=os.getcwd())
    try:
        until = time.monotonic() + 240
        while not CheckpointStore(store, RUN).read_published():
            assert first.poll() is None
            assert time.monotonic() < until, "no checkpoint"
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 1.0))
        first.kill()  # its slots and their workers die with it
    finally:
        first.kill()
        first.wait(60)
    assert first.returncode == -signal.SIGKILL, "it had ended before it was to be killed"
    workers = draw.choice([1, 2, 3])
    other = replace(job, workers=workers, batch_size=whole // workers)
    assert other.plan(manifest) == job.plan(manifest)
    run = OwnedRun.acquire(store, RUN)
    ours, result = train_elastic(
        other,
        store,
        manifest,
        str(tmp_path / "ledger"),
        Follower(),
        lambda task: launcher(task, room=workers),
        run=run,
    )
    assert "continues from checkpoint 000001-" in result.worlds[0].reason
    assert difference(ours, train_plain(job, store, manifest)) < 1e-9
    check_every_row_once_by_attempt(tmp_path / "ledger", job.epochs)


@pytest.mark.parametrize("seed", range(10))
def test_p7_a_fit_continues_after_all_workers_are_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Twice: at a step of the seed's, and then some way into the next exchange, commit or checkpoint."""
    draw = random.Random(seed)
    job, (store, manifest) = make_job(), make_data(tmp_path)
    steps = [draw.randrange(5, 13), draw.randrange(15, 26)]
    made: list[ProcessLauncher] = []
    struck: list[threading.Thread] = []

    def kill() -> None:
        time.sleep(draw.uniform(0.0, 0.3))
        for slot in made[0].slots():
            made[0].kill(slot)

    def start_kill(epoch: int, step: int) -> None:
        if len(struck) < len(steps) and epoch * job.plan(manifest).steps + step >= steps[len(struck)]:
            struck.append(threading.Thread(target=kill))
            struck[-1].start()

    def make(task: Program) -> ProcessLauncher:
        made.append(launcher(task, room=job.workers))
        return made[0]

    ledger, run = tmp_path / "ledger", OwnedRun.acquire(store, RUN)
    ours, result = train_elastic(job, store, manifest, str(ledger), Follower(start_kill), make, run=run)
    for thread in struck:
        thread.join()
    assert len(struck) == len(steps)
    assert any("continues from checkpoint" in world.reason for world in result.worlds)
    assert difference(ours, train_plain(job, store, manifest)) < 1e-9
    check_every_row_once(ledger, job.epochs)
