"""A whole training in a world of threads equals one process: losses, schedules, callbacks, metrics, validation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_collectives import Group
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import INITIAL_VERSION, Checkpoint, Phase, Position
from spark_elastic.runs.checkpoint import CheckpointPolicy, CheckpointStore
from spark_elastic.training.loop import CHANGE
from spark_elastic.training.spec import Rows
from spark_elastic.training.torch.callbacks import Callback, Training
from spark_elastic.training.torch.trainer import TorchTrainProgram
from spark_elastic.worker.program import Stopped
from tests.component.threads import make_handle, make_world, run_task
from tests.component.torch.elastic_jobs import JOBS
from tests.component.torch.hooked_job import HookedJob, make_job
from tests.component.torch.job import ROWS, RUN, make_data
from tests.fit_configs import change
from tests.unit.torch.worlds import run_in_world

pytestmark = pytest.mark.native


class TwoHeads(torch.nn.Module):
    """Two equal outputs."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> tuple[Any, Any]:
        output = self.module(x)
        return output, output[:, 0]


def train_two_heads(folder: Path, weight: float, validation_batch: int) -> dict[str, Any]:
    """The first epoch of two ranks, with a loss for each of two outputs.

    Args:
        weight: by which the rows' weights are multiplied.
        validation_batch: rows of a step of validation.
    """
    folder.mkdir()
    (store, manifest), job = make_data(folder, weight), JOBS["row weights"]
    plan = replace(job.plan(manifest), shuffle=False, global_batch=validation_batch, lanes=2)
    seen = Rows(store, manifest, plan)

    def work(group: Group) -> Any:
        made = job.task(store, manifest)
        trainer: Any = made._trainer
        config = change(made._spec.config, label_cols=("y", "w"))
        spec = replace(made._spec, config=config, validation=seen)
        model, losses = TwoHeads(trainer._objects.model), (*trainer._objects.losses, torch.nn.MSELoss())
        objects = replace(trainer._objects, model=model, losses=losses, loss_weights=(0.25, 0.75))
        return json.loads(run_task(TorchTrainProgram(spec, objects), group).result)["history"][0]

    entry: dict[str, Any] = run_in_world(2, work)[0]
    return entry


LOSSES = [prefix + name for prefix in ("", "val_") for name in ("loss", "loss_y", "loss_w")]


def test_losses_are_nan_where_all_sample_weights_are_zero(tmp_path: Path) -> None:
    entry = train_two_heads(tmp_path / "data", 0.0, 40)
    assert [math.isnan(entry[name]) for name in LOSSES] == [True] * 6


def test_losses_of_several_outputs_do_not_depend_on_the_size_of_validation_steps(tmp_path: Path) -> None:
    """Steps differ in the sums of their rows' weights."""
    small, large = (train_two_heads(tmp_path / str(rows), 1.0, rows) for rows in (40, 10))
    assert {name: large[name] for name in LOSSES} == pytest.approx({name: small[name] for name in LOSSES})
    for prefix in ("", "val_"):
        parts = 0.25 * small[f"{prefix}loss_y"] + 0.75 * small[f"{prefix}loss_w"]
        assert small[f"{prefix}loss"] == pytest.approx(parts)


class SetLearningRate(Callback):
    def on_fit_begin(self, training: Training) -> None:
        training.learning_rate = 0.01


def test_p4_the_synced_state_replaces_values_that_a_newcomer_sets_at_its_start(tmp_path: Path) -> None:
    (store, manifest), job = make_data(tmp_path), make_job()
    world = make_world(receives=True)

    def work(group: Group) -> float:
        task = job.task(store, manifest)
        trainer: Any = task._trainer
        trainer._objects = replace(trainer._objects, callbacks=(SetLearningRate(),))
        task.prepare()
        if group.rank == 0:  # three epochs later
            task._callbacks.on_fit_begin(group)
            trainer.state.optimizer.param_groups[0]["lr"] = 0.04
        task.sync(world, group)
        task._callbacks.on_world_begin(group)
        task.close()
        return float(trainer.state.optimizer.param_groups[0]["lr"])

    assert run_in_world(2, work) == [0.04, 0.04]


@dataclass(frozen=True)
class EndingJob(HookedJob):
    """`who` asks for the end before step 4 of epoch 0."""

    who: int = 0

    def task(self, store: Store, manifest: Manifest, ledger: str | None = None) -> TorchTrainProgram:
        task = super().task(store, manifest, ledger)
        trainer: Any = task._trainer
        objects = trainer._objects
        trainer._objects = replace(objects, callbacks=(*objects.callbacks, StopTraining(self.who)))
        return task


class StopTraining(Callback):
    def __init__(self, who: int) -> None:
        self._who = who

    def on_step_begin(self, training: Training, epoch: int, step: int) -> None:
        if (epoch, step, training.rank) == (0, 4, self._who):
            training.stop("enough")


@pytest.mark.parametrize("who", [0, 1])
def test_r06_a_stop_by_rank_0_within_an_epoch_ends_it_on_all_ranks(who: int, tmp_path: Path) -> None:
    (store, manifest), job = make_data(tmp_path), EndingJob(**vars(make_job()), who=who)

    def work(group: Group) -> Any:
        return json.loads(run_task(job.task(store, manifest), group).result)["history"]

    plan = job.plan(manifest)
    for history in run_in_world(2, work):
        steps = 5 if who == 0 else plan.steps
        assert [entry["epoch"] for entry in history] == ([0] if who == 0 else [0, 1])
        assert [entry["steps"] for entry in history] == [steps] * len(history)
        assert {entry["rows"] for entry in history} == {sum(map(plan.count_step_rows, range(steps)))}
        assert {entry["planned"] for entry in history} == {entry["rows"] for entry in history}
        assert {entry["val_rows"] for entry in history} == {ROWS}


@pytest.mark.parametrize(
    ("batch_size", "last", "here"),
    [
        pytest.param(8, 4, Position(0, Phase.TRAIN, 4), id="inside an epoch"),
        pytest.param(ROWS // 3, 1, Position(1, Phase.TRAIN, 0), id="epochs of one step"),
    ],
)
def test_r18_the_last_step_before_the_time_limit_is_durable(
    tmp_path: Path, batch_size: int, last: int, here: Position
) -> None:
    """What `max_runtime` brings about, heard of by one rank: all stop there, and what was not due is written."""
    (store, manifest), job = make_data(tmp_path), replace(make_job(), batch_size=batch_size)
    told: list[Checkpoint] = []

    def work(group: Group) -> tuple[Any, Any]:
        heard = iter(
            [INITIAL_VERSION] * (last - 1 + group.rank) + [INITIAL_VERSION.next(job_ends=True)] * job.workers
        )
        handle = make_handle(membership_version=lambda: next(heard), report_checkpoint=told.append)
        task = job.task(store, manifest)
        rare = CheckpointPolicy(RUN, 100_000, None)
        task._spec = replace(task._spec, checkpoints=rare, validation=None)
        task.prepare()
        outcome = task.run(make_world(), group, handle)
        task.close()
        return outcome, task.position()

    assert run_in_world(2, work) == [(Stopped(CHANGE), here)] * 2
    (checkpoint,) = told
    assert checkpoint.position == here
    CheckpointStore(store, RUN).read_first_undamaged((checkpoint,))
