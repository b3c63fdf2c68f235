"""P1 and P2 under a kill on files that somebody else wrote: all kinds of columns, in a model of six inputs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.training.torch.spec import TorchUserObjects
from tests.component.column_kinds import (
    CLASSES,
    FEATURES,
    READERS,
    ROWS,
    numbers,
    open_data,
    read_table,
    write,
)
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.job import (
    Follower,
    Job,
    LauncherFactory,
    SlowNet,
    difference,
    ledger_of,
    train_elastic,
)
from tests.planned_rows import list_row_ids
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names = torch.nn.Embedding(7, 2)
        self.out = torch.nn.Linear(4 + 3 + 2 + 5 + 1 + 4, CLASSES)

    def forward(self, v: Any, a: Any, n: Any, image: Any, day: Any, tokens: Any) -> torch.Tensor:
        whole = torch.cat([v, a, self.names(n), image, day, tokens], dim=1)
        output: torch.Tensor = self.out(torch.tanh(whole))
        return output


@dataclass(frozen=True)
class Kinds(Job):
    """A job on the columns of `write`."""

    def features(self, manifest: Manifest) -> tuple[Column, ...]:
        return tuple(manifest.column(name) for name in FEATURES)

    def objects(self) -> TorchUserObjects:
        return replace(super().objects(), transformation=numbers)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_plain(model: torch.nn.Module, store: Store, manifest: Manifest, plan: DataPlan) -> Any:
    """One process over the whole table in memory."""
    table = read_table(store, manifest)
    kinds = dict.fromkeys(table, "float64") | {"n": "int64", "y": "int64"}
    tensors = {name: torch.tensor(values.astype(kinds[name])) for name, values in table.items()}
    optimizer = sgd(model.parameters())
    for step in range(plan.steps):
        rows = torch.from_numpy(list_row_ids(plan, 0, step))
        optimizer.zero_grad()
        output = model(*(tensors[name][rows] for name in FEATURES))
        torch.nn.functional.cross_entropy(output, tensors["y"][rows]).backward()
        optimizer.step()
    return model.state_dict()


def make_job(reader: str) -> Kinds:
    torch.manual_seed(1)
    net, loss = SlowNet(Net()).double(), torch.nn.CrossEntropyLoss()
    return Kinds(net, sgd, loss, reader=reader, epochs=1, workers=2)


@pytest.mark.parametrize("reader", READERS)
def test_p1_p2_every_kind_of_column_under_a_kill(reader: str, tmp_path: Path, fault: Fault) -> None:
    write(tmp_path, reader)
    (store, manifest), job = open_data(tmp_path), make_job(reader)
    make, ledger = LauncherFactory(room=2), tmp_path / "ledger"
    strike = {"epoch 0": lambda: fault(kill, make.made, min(make.made.slots()))}
    with inject_faults(tmp_path / "faults", strike):
        ours, result = train_elastic(job, store, manifest, str(ledger), Follower(), make)
    assert len(result.worlds) > 1, "nobody was lost"
    seen = ledger_of(ledger)
    assert seen == {(0, row): 1 for row in range(ROWS)}
    assert difference(ours, train_plain(make_job(reader).model, store, manifest, job.plan(manifest))) < 1e-9


@pytest.mark.parametrize("reader", READERS[1:])
def test_petastorm_says_that_it_reads_no_vectors(reader: str, tmp_path: Path) -> None:
    write(tmp_path, "arrow")
    store, manifest = open_data(tmp_path)
    with (
        closing(open_reader(reader, store, manifest, ["v", "y"])) as opened,
        pytest.raises(InvalidInput, match="petastorm leaves out column 'v', as it does structs"),
    ):
        opened.fetch(0)
