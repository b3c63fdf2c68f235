"""Augmented training keeps P2: the same weights in worlds of 1, 2 and 3 and through a kill, as in a plain loop."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.decoding import read_footers
from spark_elastic.data.store import Store
from spark_elastic.torch import SyncBatchNorm
from spark_elastic.training.transformation import RowRandom
from tests.component.injected_faults import inject_faults, kill
from tests.component.torch.job import (
    CLASSES,
    SEED,
    Follower,
    Job,
    LauncherFactory,
    SlowNet,
    difference,
    launcher,
    ledger_of,
    train_elastic,
)
from tests.component.torch.nets import add_pace, sgd
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]

ROWS, SIDE = 600, 10


def make_pictures(folder: Path, rows: int = ROWS) -> tuple[Store, Manifest]:
    """A table of JPEGs in a column of bytes, with their classes."""
    from PIL import Image

    rng, pictures, labels = np.random.default_rng(3), [], []
    for number in range(rows):
        label = number % CLASSES
        numbers = rng.integers(0, 160, (SIDE, SIDE, 3), dtype=np.uint8)
        numbers[:, :, label] += 60
        file = io.BytesIO()
        Image.fromarray(numbers).save(file, "JPEG")
        pictures.append(file.getvalue())
        labels.append(label)
    (folder / "rows").mkdir()
    pq.write_table(
        pa.table({"x": pictures, "y": labels}), folder / "rows" / "part.parquet", row_group_size=50
    )
    store = Store.open(str(folder))
    files, groups = read_footers(store, ["rows/part.parquet"])
    return store, Manifest((Column("x", "object"), Column("y", "int64")), files, groups, "a test", "a test")


def augment(columns: dict[str, Any], rng: RowRandom | None) -> dict[str, Any]:
    """Decode; in training crop at random, flip every other picture and add noise."""
    from PIL import Image

    x = np.stack([np.asarray(Image.open(io.BytesIO(each))) for each in columns["x"]]) / 255.0
    if rng is None:
        return {**columns, "x": x[:, 1:-1, 1:-1]}
    corners, flips = rng.integers(0, 3, size=2), rng.uniform() < 0.5
    x = np.stack([each[i : i + SIDE - 2, j : j + SIDE - 2] for each, (i, j) in zip(x, corners, strict=True)])
    x = np.where(flips[:, None, None, None], x[:, :, ::-1], x)
    return {**columns, "x": x + rng.normal(scale=0.05, size=x.shape[1:])}


def build_net() -> torch.nn.Module:
    torch.manual_seed(3)
    return add_pace(torch.nn.Flatten(), torch.nn.Linear(3 * (SIDE - 2) ** 2, CLASSES))


@dataclass(frozen=True)
class PictureJob(Job):
    """A job over `make_pictures`."""

    def features(self, manifest: Manifest) -> tuple[Column, ...]:
        return (Column("x", "object"),)


JOB = PictureJob(build_net(), sgd, torch.nn.CrossEntropyLoss(), transformation=augment)


def train_plain(job: Job, store: Store, manifest: Manifest) -> dict[str, torch.Tensor]:
    """One process without ours but the plan and the rows' random numbers."""
    table = pq.read_table(store.path("rows/part.parquet"))
    pictures, y = np.array(table["x"].to_pylist(), object), torch.tensor(table["y"].to_pylist())
    model, plan = copy.deepcopy(job.model), job.plan(manifest)
    optimizer = job.optimizer(model.parameters())
    for epoch, step in product(range(job.epochs), range(plan.steps)):
        rows = plan.compute_row_ids(plan.assign_rows(epoch, step, 0, 1))
        x = augment({"x": pictures[rows]}, RowRandom(SEED, epoch, rows))["x"]
        optimizer.zero_grad()
        job.loss(model(torch.from_numpy(x)), y[torch.from_numpy(rows)]).backward()
        optimizer.step()
    return model.state_dict()


@dataclass(frozen=True)
class JobOfFewRows(PictureJob):
    """One of three ranks has none."""

    def plan(self, manifest: Manifest) -> DataPlan:
        return DataPlan.for_run(manifest.group_rows, 2, 5, self.workers, 10_000, 1 << 20)


def augment_any(columns: dict[str, Any], rng: RowRandom | None) -> dict[str, Any]:
    """As `augment`, also for no rows."""
    if len(columns["x"]):
        return augment(columns, rng)
    return {**columns, "x": np.zeros((0, SIDE - 2, SIDE - 2, 3))}


def test_a_rank_without_rows_takes_the_step_of_the_others(tmp_path: Path) -> None:
    """Its forward pass exchanges statistics, and needs the rows' shape for that."""

    def build(norm: type[torch.nn.Module]) -> torch.nn.Module:
        torch.manual_seed(3)
        width = 3 * (SIDE - 2) ** 2
        # With a small eps two nearly equal rows would amplify rounding.
        layers = torch.nn.Flatten(), norm(width, eps=1.0), torch.nn.Linear(width, CLASSES)
        return SlowNet(torch.nn.Sequential(*layers).double(), pace=0.0)

    job = JobOfFewRows(
        build(SyncBatchNorm),
        sgd,
        torch.nn.CrossEntropyLoss(),
        epochs=1,
        transformation=augment_any,
    )
    data = make_pictures(tmp_path, 100)
    ours, result = train_elastic(job, *data, None, Follower(), lambda task: launcher(task, room=3))
    assert [world.size for world in result.worlds] == [3]
    assert difference(ours, train_plain(replace(job, model=build(torch.nn.BatchNorm1d)), *data)) < 1e-9


@pytest.mark.scenario("G1")
def test_augmented_weights_are_those_of_a_plain_loop_through_a_kill(tmp_path: Path, fault: Fault) -> None:
    job, data = replace(JOB, transformation_workers=1), make_pictures(tmp_path)
    make = LauncherFactory()

    def inject_fault() -> None:
        fault(kill, make.made, sorted(make.made.slots())[0])

    ledger = tmp_path / "ledger"
    with inject_faults(tmp_path / "faults", {"epoch 1": inject_fault}):
        ours, result = train_elastic(job, *data, str(ledger), Follower(), make)
    assert [world.size for world in result.worlds][:2] == [3, 2]
    assert difference(ours, train_plain(job, *data)) < 1e-9
    assert set(ledger_of(ledger).values()) == {1}
