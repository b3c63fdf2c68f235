"""Trainings whose gradients travel by a simulated NCCL, undisturbed and under faults: P1, P2, P3, P4 and P5."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from spark_elastic.testing.fakes import ProcessLauncher
from tests import simulated_nccl
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.elastic_jobs import JOBS, TOGETHER
from tests.component.torch.hand_written import STEPS, Run, assert_exact, train
from tests.component.torch.job import Data, Follower, Job, LauncherFactory, train_and_check
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]

SWITCHED = f"gradients travel by {simulated_nccl.NAME} from now on"
SLOW = 30.0  # seconds that a communicator takes


class Training:
    """One training over the simulated NCCL, and what a test does to it."""

    def __init__(self, job: Job, data: Data, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARK_ELASTIC_BULK_BACKEND", simulated_nccl.NAME)
        self.follower = Follower()
        self._job, self._data, self._folder = job, data, folder
        self._make = LauncherFactory(3, False, "cpu", simulated_nccl.__name__)

    @property
    def cluster(self) -> ProcessLauncher:
        return self._make.made

    def find_slot(self, which: int) -> int:
        return sorted(self.cluster.slots())[which]

    def count_switches(self) -> int:
        return sum(SWITCHED in line for line in self.follower.lines)

    def await_switches(self, count: int) -> None:
        """Until so many worlds sum by the simulated NCCL. The training stands still meanwhile, and takes a step more
        than that at its end, so the line comes before."""
        until(lambda: self.count_switches() >= count, 90)  # on a busy machine, communicators take ten seconds

    def run(self, acts: dict[str, Callable[[], object]], lease: float = 5.0) -> Any:
        """Check P1, P2 and P4 at the end. Returns what the launch returned."""
        with inject_faults(self._folder / "faults", acts):
            given: Any = self._folder, self._make, self.follower
            return train_and_check(self._job, self._data, *given, lease=lease)


@pytest.fixture
def mlp(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(JOBS["mlp"], data, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.faults] * (name != TOGETHER)) for name in JOBS]
)
def test_p1_p2_p3_p4_hold_under_two_kills(
    name: str, data: Data, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(JOBS[name], data, tmp_path, monkeypatch)

    def inject_fault(which: int, switches: int) -> None:
        training.await_switches(switches)
        fault(kill, training.cluster, training.find_slot(which))

    result = training.run({"epoch 0": lambda: inject_fault(1, 1), "epoch 1": lambda: inject_fault(0, 2)})
    assert len(result.worlds) > 1, "nobody was lost"


def test_training_goes_on_while_the_next_communicator_takes_half_a_minute(
    mlp: Training, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(simulated_nccl.BUILD_SECONDS, str(SLOW))
    began: list[float] = []

    def inject_fault() -> None:
        began.append(time.monotonic())
        fault(kill, mlp.cluster, mlp.find_slot(1))

    mlp.run({"epoch 0": inject_fault})
    assert time.monotonic() - began[0] < SLOW, "it waited for the communicator"
    assert mlp.count_switches() == 0


@pytest.mark.faults
def test_a_stopped_worker_is_evicted(mlp: Training, fault: Fault) -> None:
    """It breaks no connection; the simulated NCCL would wait for it for ever."""
    stopped: list[psutil.Process] = []

    def inject_fault() -> None:
        mlp.await_switches(1)
        slot = psutil.Process(mlp.cluster.slots()[mlp.find_slot(1)])
        stopped.extend([slot, *slot.children(recursive=True)])
        for process in stopped:
            fault(os.kill, process.pid, signal.SIGSTOP)

    try:
        result = mlp.run({"epoch 0": inject_fault}, lease=1.5)
    finally:
        for process in stopped:
            if process.is_running():
                process.kill()
    assert len(result.worlds) > 1


@pytest.mark.faults
def test_an_error_that_is_reported_late_costs_a_step_and_no_worker(
    mlp: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late"
    late.write_text("1 6")
    monkeypatch.setenv(simulated_nccl.LATE_ERROR, str(late))
    monkeypatch.setenv("SPARK_ELASTIC_BUCKET_BYTES", "1000")  # several sums a step
    result = mlp.run({})
    assert not late.exists()
    assert [world.size for world in result.worlds] == [3, 3]


@pytest.mark.faults
def test_without_hybrid_recovery_every_step_is_summed_by_the_communicator(
    mlp: Training, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_HYBRID_RECOVERY", "0")
    monkeypatch.setenv(simulated_nccl.BUILD_SECONDS, "1")

    def inject_fault() -> None:
        mlp.await_switches(1)
        fault(kill, mlp.cluster, mlp.find_slot(1))

    result = mlp.run({"epoch 0": inject_fault})
    assert mlp.count_switches() == len(result.worlds)
    assert all(change.bulk_seconds >= 1 for change in result.report.world_changes)
    assert "sums by NCCL after 1." in str(result.report.world_changes[0])


@pytest.mark.faults
def test_a_worker_that_is_lost_while_all_wait_for_the_communicator_breaks_the_wait(
    mlp: Training, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated NCCL would wait for it for ever."""
    monkeypatch.setenv("SPARK_ELASTIC_HYBRID_RECOVERY", "0")
    monkeypatch.setenv(simulated_nccl.BUILD_SECONDS, "3")

    def inject_fault() -> None:
        until(lambda: mlp.follower.lines.count(simulated_nccl.BUILDS) >= 3)
        fault(kill, mlp.cluster, mlp.find_slot(1))

    thread = threading.Thread(target=inject_fault, daemon=True)
    thread.start()
    result = mlp.run({})
    thread.join()
    assert [world.size for world in result.worlds][:2] == [3, 2]


@pytest.mark.faults
def test_the_gradients_of_a_hand_written_loop(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_BULK_BACKEND", simulated_nccl.NAME)
    holds = {12: 2} if fault.on else {}
    run = Run(train, (STEPS, holds), room=3, modules=(simulated_nccl.__name__,), num_workers=3)
    run.at(9, lambda: fault(run.cluster.kill, min(run.cluster.slots())))
    assert_exact(run.results())
    assert run.sizes()[:2] == [3, 2]
    assert run.lines.getvalue().count(SWITCHED) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_workers_that_share_a_gpu_exchange_through_the_host(device: str, data: Data, tmp_path: Path) -> None:
    """NCCL builds no communicator for them."""
    follower = Follower()
    train_and_check(JOBS["mlp"], data, tmp_path, LauncherFactory(device=device), follower)
    (line,) = {line for line in follower.lines if "through host memory" in line}
    assert "ranks [0, 1, 2] share a GPU" in line
