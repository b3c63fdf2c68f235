"""The estimator's training on real processes: P1, P2, P3 and P4, undisturbed and under kills, for several nets."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.elastic_jobs import JOBS, TOGETHER
from tests.component.torch.job import (
    Follower,
    Job,
    LauncherFactory,
    check_every_row_once,
    difference,
    make_data,
    train_elastic,
    train_plain,
)
from tests.devices import ACCELERATORS
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]


@pytest.fixture
def data(tmp_path: Path) -> tuple[Store, Manifest]:
    return make_data(tmp_path)


@pytest.mark.scenario("G1", "G2", "G3")
@pytest.mark.parametrize(
    # The others say which part is wrong where all at once are.
    "name",
    [pytest.param(name, marks=[pytest.mark.faults] * (name != TOGETHER)) for name in JOBS],
)
def test_p1_p2_p3_p4_hold_under_two_kills(
    name: str, data: tuple[Store, Manifest], tmp_path: Path, fault: Fault
) -> None:
    kill_two(JOBS[name], data, tmp_path, fault, "cpu")


@pytest.mark.parametrize("device", ACCELERATORS, indirect=True)
def test_p1_p2_p3_p4_hold_under_two_kills_on_a_device(
    device: str, data: tuple[Store, Manifest], tmp_path: Path, fault: Fault
) -> None:
    kill_two(JOBS[TOGETHER], data, tmp_path, fault, device)


def kill_two(job: Job, data: tuple[Store, Manifest], tmp_path: Path, fault: Fault, device: str) -> None:
    make = LauncherFactory(device=device)
    killed: list[int] = []

    def inject_fault(which: int) -> None:
        killed.append(sorted(make.made.slots())[which])
        fault(kill, make.made, killed[-1])

    ledger = tmp_path / "ledger"
    # One slot in the first epoch, and rank 0's in the second.
    with inject_faults(
        tmp_path / "faults", {"epoch 0": lambda: inject_fault(1), "epoch 1": lambda: inject_fault(0)}
    ):
        ours, result = train_elastic(job, *data, str(ledger), Follower(), make)
    assert len(killed) == 2
    assert len(result.worlds) > 1, "nobody was lost"
    assert difference(ours, train_plain(job, *data)) < 1e-9
    check_every_row_once(ledger, job.epochs)
