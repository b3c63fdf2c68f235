"""Workers of different speed: the slow one gets fewer rows of each step, and weights and rows stay what they were."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch

from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.torch import progress, rank
from spark_elastic.torch.train.trainer import TorchTrainProgram
from tests.component.torch.job import (
    CLASSES,
    ROWS,
    WIDTH,
    Follower,
    Job,
    difference,
    launcher,
    ledger_of,
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


def build() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = (torch.nn.Linear(WIDTH, 40), torch.nn.Tanh(), torch.nn.Linear(40, CLASSES))
    return PacedByRows(*layers).double()


JOB = Job(build(), sgd, torch.nn.CrossEntropyLoss(), batch_size=EQUAL, workers=2, balance_rows=True)


def make(task: TorchTrainProgram) -> ProcessLauncher:
    return launcher(task, room=2)


def last_rows(ledger: Path) -> dict[int, float]:
    """The mean rows of a step in the second epoch, by process."""
    rows: dict[int, list[int]] = {}
    for path in ledger.glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["event"] == "contributes" and line["epoch"] == 1:
                rows.setdefault(line["pid"], []).append(len(line["rows"]))
    return {pid: mean(counts) for pid, counts in rows.items()}


@pytest.mark.parametrize("shares", [0, pytest.param(8, marks=pytest.mark.faults)])
def test_p1_p2_a_slow_worker_gets_fewer_rows_and_nothing_else_changes(shares: int, tmp_path: Path) -> None:
    job, data, follower = replace(JOB, shares=shares), make_data(tmp_path), Follower()
    ledger = tmp_path / "ledger"
    ours, result = train_elastic(job, *data, str(ledger), follower, make)
    assert [world.size for world in result.worlds] == [2]
    slow, fast = sorted(last_rows(ledger).values())
    assert slow < 0.7 * EQUAL
    assert fast > EQUAL
    assert any("from now on, by their speed" in line for line in follower.lines)
    seen = ledger_of(ledger)
    assert set(seen) == {(epoch, row) for epoch in range(job.epochs) for row in range(ROWS)}
    assert set(seen.values()) == {1}
    assert difference(ours, train_plain(job, *data)) < 1e-9
