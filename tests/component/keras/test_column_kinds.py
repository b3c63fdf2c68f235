"""P1, P2 and P7 for Keras under kills, on files of somebody else: all kinds of columns, in a model of five inputs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import pytest

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.store import Store
from tests.component.column_kinds import CLASSES, FEATURES, ROWS, numbers, open_data, read_table, write
from tests.component.injected_faults import await_fault, kill
from tests.component.keras.job import Job, difference, train_elastic, weights_of
from tests.component.torch.job import ledger_of
from tests.planned_rows import list_row_ids
from tests.scenarios import Fault

pytestmark = [
    pytest.mark.native,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3 with numpy 2
]


def six_inputs() -> Any:
    """A model of vectors, arrays, whole numbers, pictures, days and tokens."""
    shapes = dict(zip(FEATURES, [(4,), (3,), (), (5,), (1,), (4,)], strict=True))
    kinds = {name: "int32" if name == "n" else "float64" for name in FEATURES}
    inputs = {name: keras.Input(shapes[name], dtype=kinds[name], name=name) for name in FEATURES}
    parts = [keras.layers.Embedding(7, 2)(x) if name == "n" else x for name, x in inputs.items()]
    output = keras.layers.Dense(CLASSES)(keras.ops.tanh(keras.layers.Concatenate()(parts)))
    model = keras.Model(list(inputs.values()), output)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


class SlowSteps(keras.callbacks.Callback):
    """Lets a quick machine, too, be met in mid-epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.01)
        await_fault(self.epoch, batch)


@dataclass(frozen=True)
class Kinds(Job):
    """A job on all kinds of columns."""

    def columns(self, manifest: Manifest) -> tuple[Column, ...]:
        return tuple(manifest.column(name) for name in FEATURES)


JOB = Kinds(six_inputs, tuple(FEATURES), callbacks=(SlowSteps(),), transformation=numbers, workers=2)


def train_plain(job: Job, store: Store, manifest: Manifest) -> list[Any]:
    """The weights of Keras's own steps, in one process over the whole table in memory."""
    table = read_table(store, manifest)
    try:
        model, plan = job.archive().load(), job.plan(manifest)
        for epoch in range(job.epochs):
            for step in range(plan.steps):
                rows = list_row_ids(plan, epoch, step)
                model.train_on_batch([table[name][rows] for name in FEATURES], table["y"][rows])
        weights: list[Any] = model.get_weights()
    finally:
        keras.config.set_floatx("float32")
    return weights


def test_a_transformation_of_images_is_tried_on_a_row_of_the_table(tmp_path: Path) -> None:
    write(tmp_path, "arrow")
    task = JOB.task(*open_data(tmp_path))
    try:
        task.prepare()
        task.close()
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.faults  # of the kinds of columns; each build has Keras's promises in test_elastic_training.py
def test_p1_p2_every_kind_of_column_under_a_kill(tmp_path: Path, fault: Fault) -> None:
    write(tmp_path, "arrow")
    store, manifest = open_data(tmp_path)
    strike = {"epoch 1": lambda launcher: fault(kill, launcher, min(launcher.slots()))}
    train_elastic(JOB, store, manifest, tmp_path, strike)
    assert ledger_of(tmp_path / "ledger") == {(epoch, row): 1 for epoch in range(2) for row in range(ROWS)}
    assert difference(weights_of(store), train_plain(JOB, store, manifest)) < 1e-9
