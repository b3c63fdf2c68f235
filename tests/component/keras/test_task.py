"""A whole Keras training in a world of threads equals Keras's own steps in one process: weights, losses, metrics."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import pytest

from elastic_collectives import Group
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from tests.checkpoints import reload_from_checkpoint
from tests.component.keras.job import JOBS, Job, difference, train_plain, weights_of
from tests.component.threads import make_handle, make_world
from tests.component.torch.job import ROWS, make_data
from tests.worlds import run_in_world

pytestmark = [
    pytest.mark.native,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3 with numpy 2
]


@pytest.mark.parametrize("name", JOBS)
def test_p2_a_world_of_two_equals_keras(name: str, tmp_path: Path) -> None:
    job, (store, manifest) = JOBS[name], make_data(tmp_path)
    results = train_in_two(job, store, manifest)
    assert len({result["digest"] for result in results}) == 1
    theirs, losses = train_plain(job, store, manifest)
    assert difference(weights_of(store), theirs) < 1e-9
    history = results[0]["history"]
    assert [epoch["loss"] for epoch in history] == pytest.approx(losses, rel=1e-9)
    assert [epoch["rows"] for epoch in history] == [ROWS] * job.epochs
    for epoch in history if job.validates else []:
        assert epoch["val_rows"] == ROWS
        assert 0 < epoch["val_accuracy" if name == "row weights" else "val_loss"] <= 4


def test_a_worker_that_joins_behind_the_validation_knows_its_losses(tmp_path: Path) -> None:
    task = replace(JOBS["two outputs"], validates=True).task(*make_data(tmp_path))
    task.prepare()
    progress, trainer = task._state.progress, task._trainer
    progress.metric_sums, progress.validation.has_weight = {"w_loss": [6.0, 3]}, True  # as received
    assert trainer.epoch_metrics()["val_w_loss"] == 2.0
    task.close()
    keras.config.set_floatx("float32")


def test_losses_are_nan_where_all_sample_weights_are_zero(tmp_path: Path) -> None:
    job = replace(JOBS["two outputs"], weight="w", validates=True, epochs=1)
    (entry, *_), *_ = (each["history"] for each in train_in_two(job, *make_data(tmp_path, weight=0.0)))
    names = [prefix + name for prefix in ("", "val_") for name in ("loss", "w_loss", "id_loss")]
    assert [name for name in names if not math.isnan(entry[name])] == []


def train_in_two(job: Job, store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    tasks = [job.task(store, manifest) for _ in range(2)]
    for task in tasks:  # one after the other: Keras builds no two models at a time
        task._spec = replace(task._spec, checkpoints=None)
        task.prepare()

    def work(group: Group) -> Any:
        task = tasks[group.rank]
        outcome = task.run(make_world(), group, make_handle())
        digest = task._state.digest()
        reload_from_checkpoint(task._state)  # all of it goes into a checkpoint and back
        assert task._state.digest() == digest
        task.close()
        return outcome

    outcomes = run_in_world(2, work, timeout=150.0)  # TensorFlow traces for seconds, in both threads
    keras.config.set_floatx("float32")
    return [json.loads(outcome.result) for outcome in outcomes]
