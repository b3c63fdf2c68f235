"""Each option of a torch training, in a world of threads, against a plain loop of one process over the same plan.

Lightning's steps, the user's own step, 16-bit forwards and gradients, clipping, the batch of validation.
"""

from __future__ import annotations

import copy
import json
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
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.training.spec import Rows
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.threads import run_task
from tests.component.torch.job import ROWS, WIDTH, Job, difference, make_data
from tests.fit_configs import change
from tests.pages import blocks
from tests.unit.torch.worlds import run_in_world

pytestmark = pytest.mark.native

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
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        ).to(dtype)
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
    """kind: of the objective. options: of `change`."""

    kind: str = "loss"
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    module: type[ModuleWithTrainingStep] = ModuleWithTrainingStep

    def objects(self) -> TorchUserObjects:
        if self.kind == "lightning":
            return TorchUserObjects(self.module(self.dtype), None, ())
        if self.kind == "loss":
            return TorchUserObjects(Net(self.dtype), sgd, (loss_of,))
        return TorchUserObjects(
            Net(self.dtype),
            sgd,
            (),
            train_minibatch_fn={"mean": compute_own_loss, "rows": own_rows}[self.kind],
        )


def make_table(folder: Path, poisoned: bool) -> tuple[Store, Manifest]:
    """poisoned: one row has a label whose scaled gradient fp16 cannot hold."""
    store, manifest = make_data(folder)
    if poisoned:
        path = store.path("rows/part.parquet")
        table = pq.read_table(path)
        weights = table["w"].to_numpy().copy()
        weights[17] = 1e7
        table = table.set_column(table.schema.get_field_index("w"), "w", [weights])
        pq.write_table(table, path, row_group_size=50)
    return store, manifest


def train(
    case: Case, store: Store, manifest: Manifest
) -> tuple[list[dict[str, torch.Tensor]], Any, set[Any]]:
    """The weights of each rank, the history, and how forwards were computed."""
    job = Job(Net(), sgd, None, epochs=EPOCHS, batch_size=50, workers=WORKERS)
    seen = Rows(store, manifest, replace(job.plan(manifest), shuffle=False))
    spec = job.task(store, manifest)._spec
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


def train_plain(
    case: Case, store: Store, manifest: Manifest, **less: Any
) -> tuple[dict[str, torch.Tensor], int]:
    """Weights, and how many steps were left out. less: options that are taken away."""
    options = case.options | less
    table = pq.read_table(store.path("rows/part.parquet"))
    x = torch.tensor(np.stack(table["x"].to_numpy()), dtype=case.dtype)
    y = torch.tensor(table["w"].to_numpy().copy(), dtype=case.dtype)
    model, precision, skipped = Net(case.dtype), options.get("precision"), 0
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    clip = options.get("gradient_clip_value")
    plan = Job(Net(), sgd, None, batch_size=50, workers=WORKERS).plan(manifest)
    for epoch in range(EPOCHS):
        for step in range(plan.steps):
            rows = torch.from_numpy(plan.compute_row_ids(plan.assign_rows(epoch, step, 0, 1)))
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
def test_p2_an_option_changes_nothing_that_a_plain_loop_would_not(tmp_path: Path, case: Case) -> None:
    store, manifest = make_table(tmp_path, poisoned=False)
    ranks, history, seen = train(case, store, manifest)
    assert difference(ranks[0], train_plain(case, store, manifest)[0]) < 1e-9
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    if case.options.get("gradient_clip_value"):
        assert difference(ranks[0], train_plain(case, store, manifest, gradient_clip_value=None)[0]) > 1e-3, (
            "nothing clipped"
        )
    if case.kind == "lightning":
        assert [entry["learning_rate"] for entry in history] == [RATE, RATE / 2]
        assert {entry["level"] for entry in history} == {2.0}
        assert {entry["val_rows"] for entry in history} == {ROWS}
        assert [entry["at"] for entry in history] == [0.0, 1.0]
        assert [entry["before"] for entry in history] == [0.0, ROWS / 100]
    most = max(rows for training, _, rows in seen if not training)
    assert most == case.options.get("val_batch_size", 50)


def test_validation_values_keep_the_names_that_the_module_logs(tmp_path: Path) -> None:
    store, manifest = make_table(tmp_path, poisoned=False)
    _, history, _ = train(Case("lightning"), store, manifest)
    assert {name for name in history[0] if name.startswith("val_")} == {"val_far", "val_rows"}
    ranks, history, _ = train(Case("lightning", module=ModuleLoggingLoss), store, manifest)
    assert {name for name in history[0] if name.startswith("val_")} == {"val_loss", "val_rows"}
    table, net = pq.read_table(store.path("rows/part.parquet")), Net(torch.float64)
    net.load_state_dict(ranks[0])
    with torch.no_grad():
        output = net(torch.tensor(np.stack(table["x"].to_numpy()), dtype=torch.float64))
        expected = loss_of(output, torch.tensor(table["w"].to_numpy().copy()))
    assert history[-1]["val_loss"] == pytest.approx(float(expected))


def test_the_lightning_module_of_the_documentation_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark")
    from spark_elastic.estimators import torch_estimator, torch_objects, validation

    asked: list[Any] = []
    fits = torch_estimator.ElasticTorchEstimator
    monkeypatch.setattr(
        fits,
        "fit",
        lambda self, df: asked.append(
            validation.build_request(self._values, torch_objects.check_torch_objects)
        ),
    )
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(LightningModule=torch.nn.Module))
    (program,) = [each for each in blocks("estimators.md", "python") if "LightningModule" in each]
    exec(compile(program.replace("Linear(10", f"Linear({WIDTH}"), "estimators.md", "exec"), {"df": None})
    case: Any = SimpleNamespace(options={}, objects=lambda: asked[0].objects)
    store, manifest = make_table(tmp_path, poisoned=False)
    _, history, _ = train(case, store, manifest)
    assert {"loss", "val_loss", "val_rows"} <= history[0].keys()
    assert history[-1]["val_loss"] < history[0]["val_loss"]


def test_modules_in_evaluation_mode_stay_in_it(tmp_path: Path) -> None:
    """Behind each validation, too."""
    store, manifest = make_table(tmp_path, poisoned=False)
    ranks, _, _ = train(Case("lightning", module=ModuleWithFrozenLayer), store, manifest)
    assert ranks[0]["norm.num_batches_tracked"] == 0
    assert not ranks[0]["norm.running_mean"].any()


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("loss", "bf16"),
        ("loss", "fp16"),
        ("mean", "bf16"),
        ("rows", "fp16"),
        ("lightning", "bf16"),
        ("lightning", "fp16"),
    ],
)
def test_forwards_are_computed_in_the_precision_that_was_asked_for(
    tmp_path: Path, kind: str, precision: str
) -> None:
    """fp16: a row that overflows on one rank alone makes both leave the step out, as a plain loop does."""
    case = Case(kind, torch.float32, {"precision": precision})
    store, manifest = make_table(tmp_path, poisoned=precision == "fp16")
    ranks, history, seen = train(case, store, manifest)
    expected, skipped = train_plain(case, store, manifest)
    assert {dtype for _, dtype, _ in seen} == {KINDS[precision]}
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    assert difference(ranks[0], expected) < 0.05
    assert history[-1].get("skipped_steps", 0) == skipped
    assert skipped == (EPOCHS if precision == "fp16" else 0), "a step of each epoch has the row"


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_gradients_are_exchanged_in_16_bits(tmp_path: Path, wire: str) -> None:
    case = Case(dtype=torch.float32, options={"gradient_compression": wire})
    store, manifest = make_table(tmp_path, poisoned=False)
    ranks, _, _ = train(case, store, manifest)
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    assert 1e-6 < difference(ranks[0], train_plain(case, store, manifest)[0]) < 0.02
