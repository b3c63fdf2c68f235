"""Workers of different speed: the slow one gets fewer rows of each step, and weights and rows stay what they were."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
import torch

from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.torch import progress, rank
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.torch.job import (
    CLASSES,
    WIDTH,
    Follower,
    Job,
    check_every_row_once,
    difference,
    launcher,
    make_data,
    train_elastic,
    train_plain,
)
from tests.component.torch.nets import sgd

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

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


def make(task: TorchTrainProgram) -> ProcessLauncher:
    return launcher(task, room=2)


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
    ledger = tmp_path / "ledger"
    ours, result = train_elastic(job, *data, str(ledger), follower, make)
    assert [world.size for world in result.worlds] == [2]
    slow, fast = sorted(mean_rows(ledger, epoch=1).values())
    assert slow < 0.7 * EQUAL
    assert fast > EQUAL
    assert any("from now on, by their speed" in line for line in follower.lines)
    check_every_row_once(ledger, job.epochs)
    assert difference(ours, train_plain(job, *data)) < 1e-9


@pytest.mark.faults  # twenty windows of half a second pass before a worker counts as hopeless
def test_p1_p2_a_worker_that_stays_slow_whatever_it_is_given_is_exchanged(tmp_path: Path) -> None:
    model = build(partial(HasAHopelessWorker, mark=tmp_path / "slow"))
    job, data, follower = replace(JOB, model=model, workers=3, epochs=8), make_data(tmp_path), Follower()
    ledger = tmp_path / "ledger"
    ours, result = train_elastic(
        job, *data, str(ledger), follower, lambda task: launcher(task, 3, spares=True)
    )
    assert [world.size for world in result.worlds] == [3, 2, 3]
    slow = int((tmp_path / "slow").read_text())
    assert slow in mean_rows(ledger, epoch=1)
    assert slow not in mean_rows(ledger, epoch=job.epochs - 1)
    check_every_row_once(ledger, job.epochs)
    assert difference(ours, train_plain(job, *data)) < 1e-9
