"""A whole training in a world of threads equals one process: losses, schedules, callbacks, metrics, validation; and
each option, such as Lightning's steps, the user's own, 16 bits and clipping.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import mse_loss

from elastic_collectives import Group
from spark_elastic.protocol.types import INITIAL_VERSION, Checkpoint, Phase, Position
from spark_elastic.runs.checkpoint import CheckpointPolicy, CheckpointStore
from spark_elastic.training.loop import CHANGE
from spark_elastic.training.spec import Rows
from spark_elastic.training.torch.callbacks import Callback, Training
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from spark_elastic.worker.program import Stopped
from tests.component.threads import make_handle, make_world, run_task
from tests.component.torch.elastic_jobs import make_hooked_job
from tests.component.torch.job import ROWS, RUN, WIDTH, Data, Job, difference, make_data
from tests.fit_configs import change
from tests.pages import blocks
from tests.planned_rows import list_row_ids
from tests.worlds import run_in_world

pytestmark = pytest.mark.native


def test_losses_are_nan_where_all_sample_weights_are_zero(tmp_path: Path) -> None:
    data, job = make_data(tmp_path, weight=0.0), replace(make_hooked_job(), weight="w", epochs=1)
    history = run_in_world(2, lambda group: json.loads(run_task(job.task(*data), group).result)["history"])
    losses = [prefix + name for prefix in ("", "val_") for name in ("loss", "loss_y", "loss_w")]
    assert [math.isnan(history[0][0][name]) for name in losses] == [True] * 6


class SetLearningRate(Callback):
    def on_fit_begin(self, training: Training) -> None:
        training.learning_rate = 0.01


def test_p4_the_synced_state_replaces_values_that_a_newcomer_sets_at_its_start(data: Data) -> None:
    job = make_hooked_job()
    world = make_world(receives=True)

    def work(group: Group) -> float:
        task = job.task(*data)
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


class StopTraining(Callback):
    """`who` asks for the end before step 4 of epoch 0."""

    def __init__(self, who: int) -> None:
        self._who = who

    def on_step_begin(self, training: Training, epoch: int, step: int) -> None:
        if (epoch, step, training.rank) == (0, 4, self._who):
            training.stop("enough")


@pytest.mark.parametrize("who", [0, 1])
def test_r06_a_stop_by_rank_0_within_an_epoch_ends_it_on_all_ranks(who: int, data: Data) -> None:
    job = make_hooked_job()

    def work(group: Group) -> Any:
        task = job.task(*data)
        trainer: Any = task._trainer
        objects = trainer._objects
        trainer._objects = replace(objects, callbacks=(*objects.callbacks, StopTraining(who)))
        return json.loads(run_task(task, group).result)["history"]

    plan = job.plan(data[1])
    for history in run_in_world(2, work):
        steps = 5 if who == 0 else plan.steps
        assert [entry["epoch"] for entry in history] == ([0] if who == 0 else [0, 1])
        assert [entry["steps"] for entry in history] == [steps] * len(history)
        assert {entry["rows"] for entry in history} == {sum(map(plan.count_step_rows, range(steps)))}
        assert {entry["planned"] for entry in history} == {entry["rows"] for entry in history}
        assert {entry["val_rows"] for entry in history} == {ROWS}


@pytest.mark.parametrize(  # inside of an epoch; in epochs of one step
    ("batch_size", "last", "here"),
    [(8, 4, Position(0, Phase.TRAIN, 4)), (ROWS // 3, 1, Position(1, Phase.TRAIN, 0))],
)
def test_r18_the_last_step_before_the_time_limit_is_durable(
    data: Data, batch_size: int, last: int, here: Position
) -> None:
    """What `max_runtime` brings about, heard of by one rank: all stop there, and what was not due is written."""
    job = replace(make_hooked_job(), batch_size=batch_size)
    told: list[Checkpoint] = []

    def work(group: Group) -> tuple[Any, Any]:
        ends = [INITIAL_VERSION.next(job_ends=True)] * job.workers
        heard = iter([INITIAL_VERSION] * (last - 1 + group.rank) + ends)
        handle = make_handle(membership_version=lambda: next(heard), report_checkpoint=told.append)
        task = job.task(*data)
        rare = CheckpointPolicy(RUN, 100_000, None)
        task._spec = replace(task._spec, checkpoints=rare, validation=None)
        task.prepare()
        outcome = task.run(make_world(), group, handle)
        task.close()
        return outcome, task.position()

    assert run_in_world(2, work) == [(Stopped(CHANGE), here)] * 2
    (checkpoint,) = told
    assert checkpoint.position == here
    CheckpointStore(data[0], RUN).read_first_undamaged((checkpoint,))


RATE, WORKERS, EPOCHS = 1.0, 2, 2
SMALL = 0.05  # of the loss: its gradients times the first scale stay within fp16
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return SMALL * mse_loss(output, label)


class Net(torch.nn.Module):
    """One number a row; remembers how its forwards were computed."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers = torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        self.layers = torch.nn.Sequential(*layers).to(dtype)
        self.seen: set[tuple[bool, torch.dtype, int]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)[:, 0]
        self.seen.add((self.training, output.dtype, len(x)))
        return output


class ModuleWithTrainingStep(Net):
    """What a LightningModule has."""

    def training_step(self, batch: Any, number: int) -> Any:
        x, y = batch["x"], batch["w"]  # as in Horovod
        assert all(map(torch.equal, batch, (x, y)))
        loss = loss_of(self(x), y)
        self.log("level", 2.0)  # type: ignore[operator]
        at: Any = self._trainer
        self.log("at", at.current_epoch)  # type: ignore[operator]
        self.log("before", at.global_step - number)  # type: ignore[operator]
        return {"loss": loss}

    def validation_step(self, batch: Any, number: int) -> None:
        x, y = batch
        self.log("val_far", (self(x) - y).abs().mean())  # type: ignore[operator]

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        halved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "epoch"}}


class ModuleLoggingLoss(ModuleWithTrainingStep):
    """As most modules do."""

    def validation_step(self, batch: Any, number: int) -> None:
        x, y = batch
        self.log("val_loss", loss_of(self(x), y))  # type: ignore[operator]


class ModuleWithFrozenLayer(ModuleWithTrainingStep):
    """Whose first layer stays as it is."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(dtype)
        self.norm = torch.nn.BatchNorm1d(WIDTH, dtype=dtype).eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def compute_own_loss(model: Any, features: Any, labels: Any) -> torch.Tensor:
    return loss_of(model(*features), labels[0])


def own_rows(model: Any, features: Any, labels: Any) -> torch.Tensor:
    return SMALL * mse_loss(model(*features), labels[0], reduction="none")


@dataclass(frozen=True)
class Case:
    """kind: of the objective. options: fields of the FitConfig."""

    kind: str = "loss"
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    module: type[ModuleWithTrainingStep] = ModuleWithTrainingStep

    def objects(self) -> TorchUserObjects:
        if self.kind == "lightning":
            return TorchUserObjects(self.module(self.dtype), None, ())
        if self.kind == "loss":
            return TorchUserObjects(Net(self.dtype), sgd, (loss_of,))
        own = {"mean": compute_own_loss, "rows": own_rows}[self.kind]
        return TorchUserObjects(Net(self.dtype), sgd, (), train_minibatch_fn=own)


def poison(data: Data) -> None:
    """Give one row a label whose scaled gradient fp16 cannot hold."""
    path = data[0].path("rows/part.parquet")
    table = pq.read_table(path)
    weights = table["w"].to_numpy().copy()
    weights[17] = 1e7
    table = table.set_column(table.schema.get_field_index("w"), "w", [weights])
    pq.write_table(table, path, row_group_size=50)


def train(case: Case, data: Data) -> tuple[list[dict[str, torch.Tensor]], Any, set[Any]]:
    """The weights of each rank, the history, and how forwards were computed."""
    job = Job(Net(), sgd, None, epochs=EPOCHS, batch_size=50, workers=WORKERS)
    seen = Rows(*data, replace(job.plan(data[1]), shuffle=False))
    spec = job.task(*data)._spec
    config = change(spec.config, label_cols=("w",), **case.options)
    spec = replace(spec, config=config, validation=seen)
    objects = case.objects()  # once: threads that draw at the same time get other numbers

    def work(group: Group) -> tuple[Any, Any, Any]:
        task = TorchTrainProgram(spec, copy.deepcopy(objects))
        outcome = run_task(task, group)
        model: Any = task._trainer.state.model  # type: ignore[attr-defined]
        return model.state_dict(), json.loads(outcome.result)["history"], getattr(model, "seen", set())

    ranks = run_in_world(WORKERS, work)
    return [rank[0] for rank in ranks], ranks[0][1], ranks[0][2]


def train_plain(case: Case, data: Data, **less: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Weights, and how many steps were left out. less: options that are taken away."""
    options = case.options | less
    table = pq.read_table(data[0].path("rows/part.parquet"))
    x = torch.tensor(np.stack(table["x"].to_numpy()), dtype=case.dtype)
    y = torch.tensor(table["w"].to_numpy().copy(), dtype=case.dtype)
    model, precision, skipped = Net(case.dtype), options.get("precision"), 0
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    clip = options.get("gradient_clip_value")
    plan = Job(Net(), sgd, None, batch_size=50, workers=WORKERS).plan(data[1])
    for epoch in range(EPOCHS):
        for step in range(plan.steps):
            rows = torch.from_numpy(list_row_ids(plan, epoch, step))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=KINDS[precision]) if precision else nullcontext():
                output = model(x[rows])
            scaler.scale(loss_of(output.to(case.dtype), y[rows])).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_value_(model.parameters(), clip)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
        if case.kind == "lightning":
            optimizer.param_groups[0]["lr"] *= 0.5
    return copy.deepcopy(model.state_dict()), skipped


EXACT = [
    pytest.param(Case("lightning"), id="a LightningModule"),
    pytest.param(Case("mean"), id="train_minibatch_fn of a mean"),
    pytest.param(Case("rows"), id="train_minibatch_fn of rows"),
    pytest.param(Case(options={"gradient_clip_value": 0.003}), id="gradient_clip_value"),
    pytest.param(Case(options={"inmemory_cache_all": True}), id="inmemory_cache_all"),
    pytest.param(Case(options={"val_batch_size": 7}), id="val_batch_size"),
]


@pytest.mark.parametrize("case", EXACT)
def test_p2_an_option_changes_nothing_that_a_plain_loop_would_not(data: Data, case: Case) -> None:
    ranks, history, seen = train(case, data)
    assert difference(ranks[0], train_plain(case, data)[0]) < 1e-9
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    if case.options.get("gradient_clip_value"):
        free = train_plain(case, data, gradient_clip_value=None)[0]
        assert difference(ranks[0], free) > 1e-3, "nothing clipped"
    if case.kind == "lightning":
        assert [entry["learning_rate"] for entry in history] == [RATE, RATE / 2]
        assert {entry["level"] for entry in history} == {2.0}
        assert {entry["val_rows"] for entry in history} == {ROWS}
        assert [entry["at"] for entry in history] == [0.0, 1.0]
        assert [entry["before"] for entry in history] == [0.0, ROWS / 100]
    most = max(rows for training, _, rows in seen if not training)
    assert most == case.options.get("val_batch_size", 50)


def test_validation_values_keep_the_names_that_the_module_logs(data: Data) -> None:
    _, history, _ = train(Case("lightning"), data)
    assert {name for name in history[0] if name.startswith("val_")} == {"val_far", "val_rows"}
    ranks, history, _ = train(Case("lightning", module=ModuleLoggingLoss), data)
    assert {name for name in history[0] if name.startswith("val_")} == {"val_loss", "val_rows"}
    table, net = pq.read_table(data[0].path("rows/part.parquet")), Net(torch.float64)
    net.load_state_dict(ranks[0])
    with torch.no_grad():
        output = net(torch.tensor(np.stack(table["x"].to_numpy()), dtype=torch.float64))
        expected = loss_of(output, torch.tensor(table["w"].to_numpy().copy()))
    assert history[-1]["val_loss"] == pytest.approx(float(expected))


def test_the_lightning_module_of_the_documentation_trains(data: Data, monkeypatch: Any) -> None:
    pytest.importorskip("pyspark")
    from spark_elastic.estimators import torch_estimator, torch_objects, validation

    asked: list[Any] = []
    fits = torch_estimator.ElasticTorchEstimator
    build, check = validation.build_request, torch_objects.check_torch_objects
    monkeypatch.setattr(fits, "fit", lambda self, df: asked.append(build(self._values, check)))
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(LightningModule=torch.nn.Module))
    (program,) = [each for each in blocks("estimators.md", "python") if "LightningModule" in each]
    exec(compile(program.replace("Linear(10", f"Linear({WIDTH}"), "estimators.md", "exec"), {"df": None})
    case: Any = SimpleNamespace(options={}, objects=lambda: asked[0].objects)
    _, history, _ = train(case, data)
    assert {"loss", "val_loss", "val_rows"} <= history[0].keys()
    assert history[-1]["val_loss"] < history[0]["val_loss"]


def test_modules_in_evaluation_mode_stay_in_it(data: Data) -> None:
    """Behind each validation, too."""
    ranks, _, _ = train(Case("lightning", module=ModuleWithFrozenLayer), data)
    assert ranks[0]["norm.num_batches_tracked"] == 0
    assert not ranks[0]["norm.running_mean"].any()


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("loss", "bf16"), ("mean", "bf16"), ("rows", "fp16"), ("lightning", "bf16"), ("lightning", "fp16")],
)
def test_forwards_are_computed_in_the_precision_asked_for(data: Data, kind: str, precision: str) -> None:
    """fp16: a row that overflows on one rank alone makes both leave the step out, as a plain loop does."""
    case = Case(kind, torch.float32, {"precision": precision})
    if precision == "fp16":
        poison(data)
    ranks, history, seen = train(case, data)
    expected, skipped = train_plain(case, data)
    assert {dtype for _, dtype, _ in seen} == {KINDS[precision]}
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    assert difference(ranks[0], expected) < 0.05
    assert history[-1].get("skipped_steps", 0) == skipped
    assert skipped == (EPOCHS if precision == "fp16" else 0), "a step of each epoch has the row"


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_gradients_are_exchanged_in_16_bits(data: Data, wire: str) -> None:
    case = Case(dtype=torch.float32, options={"gradient_compression": wire})
    ranks, _, _ = train(case, data)
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    assert 1e-6 < difference(ranks[0], train_plain(case, data)[0]) < 0.02
