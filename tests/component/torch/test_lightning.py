"""Lightning's Trainer on real processes: a worker is killed, and another one takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.component.torch.hand_written import Lost, Run, assert_continued, hold, run_in_two_worlds
from tests.scenarios import Fault

pytestmark = [
    pytest.mark.native,
    pytest.mark.timeout(240),
    # Lightning uses what torch has deprecated, and advises to have worker processes.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*does not have many workers.*"),
]

ROWS, EPOCHS, BATCH = 38, 3, 6
NAMES = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
QUIET = dict.fromkeys(NAMES, False)
# What both packages of Lightning import; a program that finds one of them in its process uses that.
TWO: Any = {"room": 2, "num_workers": 2, "modules": ("torch.distributed.fsdp", "torchmetrics")}


def train_net(
    folder: str, package: str, holds: dict[int, int | str], options: dict[str, Any], divides: bool = False
) -> dict[str, Any]:
    """A net whose backbone is unfrozen in the second epoch, in a group of its own, and a ledger that is trained with
    it: a row's count grows by exactly 1 when its step is applied.

    divides: the workers of a job have the net divided by FSDP2, and save a checkpoint at the end.
    """
    import importlib
    import time

    pl = importlib.import_module(package)
    import spark_elastic.torch as hvd
    from spark_elastic.integrations.lightning import ElasticModelParallelStrategy, ElasticStrategy
    from spark_elastic.worker.context import get_context

    divides = divides and get_context() is not None

    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 4, generator=drawn, dtype=torch.float64)
    rows = torch.utils.data.TensorDataset(torch.arange(ROWS), x, x.sum(dim=1).sin())
    loader = hvd.elastic.ElasticDataLoader(rows, BATCH)
    trained: list[int] = []

    class Ledger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = torch.nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))

        def forward(self, row: Any) -> Any:
            return self.counts[row]

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.backbone = torch.nn.Linear(4, 4).double()
            self.linear = torch.nn.Linear(4, 1).double()
            self.ledger = Ledger()

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            for part in (self.backbone, self.linear, self.ledger) if divides else ():
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any) -> Any:
            row, features, labels = batch
            loss = (self.linear(self.backbone(features)).squeeze(1) - labels).pow(2).mean()
            self.log("loss", loss, sync_dist=True)
            rate = self.trainer.optimizers[0].param_groups[1]["lr"]
            return loss - self.ledger(row).mean() * loader.global_rows / rate

        def validation_step(self, batch: Any) -> None:
            _, features, labels = batch
            output = self.linear(self.backbone(features)).squeeze(1)
            self.log("val", (output - labels).pow(2).mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            steps = self.trainer.estimated_stepping_batches  # makes Lightning ask for the rows early
            ledger = {"params": self.ledger.parameters(), "lr": 1.0}
            groups = [{"params": self.linear.parameters(), "momentum": 0.9}, ledger]
            optimizer = torch.optim.SGD(groups, lr=0.05)
            # Not LambdaLR: torch refuses groups that come after it.
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1 - 1 / (1 + steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class SlowSteps(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            time.sleep(0.03)
            if trainer.fit_loop._should_accumulate():
                return
            trained.append(trainer.global_step)
            print(f"step {trainer.global_step}", flush=True)  # noqa: T201 - what the test waits for

    strategy: Any = ElasticStrategy()
    if divides:
        strategy = ElasticModelParallelStrategy(save_distributed_checkpoint=False)
    adapter: Any = strategy._adapter
    commit = adapter.commit

    def commit_and_hold() -> None:
        commit()
        if trained and trained[-1] in holds:
            hold(adapter.state, holds[trained[-1]])

    adapter.commit = commit_and_hold
    thawing = pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.02)
    options = {"callbacks": [SlowSteps(), thawing], "default_root_dir": folder, **QUIET, **options}
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=EPOCHS, **options)
    net = Net()
    trainer.fit(net, loader, torch.utils.data.DataLoader(rows, 4))
    if divides:
        trainer.save_checkpoint(f"{folder}/saved.ckpt")
    whole = {n: getattr(p, "full_tensor", lambda p=p: p)().detach() for n, p in net.named_parameters()}
    return {
        "ledger": whole.pop("ledger.counts").tolist(),
        "weights": torch.cat([p.reshape(-1) for p in whole.values()]).tolist(),
        "trained": trained,
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop.total_batch_idx + 1,
        "validated": float(trainer.callback_metrics["val"]),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }


@pytest.mark.scenario("G2")
@pytest.mark.parametrize(
    ("package", "options", "steps", "divides"),
    [
        ("pytorch_lightning", {"val_check_interval": 3}, 21, False),
        ("lightning.pytorch", {"accumulate_grad_batches": 2}, 12, True),
    ],
)
def test_p1_p2_a_trainer_continues_at_the_step_in_flight(
    package: str, options: dict[str, Any], steps: int, divides: bool, fault: Fault, tmp_path: Path
) -> None:
    alone = train_net(str(tmp_path), "lightning.pytorch", {}, options)
    assert alone["trained"] == list(range(1, steps + 1))
    count = EPOCHS / options.get("accumulate_grad_batches", 1)
    arguments = (str(tmp_path), package, {9: 2, 11: 3} if fault.on else {}, options, divides)
    run = Run(train_net, arguments, max_workers=2, **TWO)
    run.at(5, lambda: fault(run.workers()[0].kill))
    results = run.results()
    assert_continued(run, results, alone, count, "steps", "epoch", "batches", "rate")
    for result in results:
        assert result["validated"] == pytest.approx(alone["validated"], rel=1e-9)
    if divides:
        saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["state_dict"]
        assert saved.pop("ledger.counts").tolist() == results[0]["ledger"]
        assert torch.cat([part.reshape(-1) for part in saved.values()]).tolist() == results[0]["weights"]


@pytest.mark.parametrize(
    ("strategy", "options", "advice"),
    [
        ({"commit_every": 0}, {}, "at least 1"),
        ({"static": True}, {}, "no option 'static'"),
        ({}, {"devices": 2}, "leave devices and num_nodes out"),
        ({}, {"num_nodes": 2}, "leave devices and num_nodes out"),
        ({}, {"max_epochs": 1}, "got a DataLoader: make it by ElasticDataLoader"),
    ],
)
def test_a_trainer_that_cannot_be_elastic_is_refused(
    strategy: dict[str, Any], options: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    import lightning.pytorch as pl

    from spark_elastic.errors import InvalidInput
    from spark_elastic.integrations.lightning import ElasticStrategy

    class Net(pl.LightningModule):  # type: ignore[misc]
        def training_step(self, batch: Any) -> None:
            raise AssertionError("a batch was trained")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    options |= {"accelerator": "cpu", "default_root_dir": tmp_path, **QUIET}
    rows = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(InvalidInput, match=advice):
        pl.Trainer(strategy=ElasticStrategy(**strategy), **options).fit(Net(), rows)


def test_the_trainer_uses_the_gpu_that_the_worker_sees() -> None:
    from spark_elastic.errors import InvalidInput
    from spark_elastic.integrations.lightning import ElasticStrategy

    strategy = ElasticStrategy()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    strategy._configure_launcher()
    assert strategy.root_device == torch.device("cuda", 0)
    assert strategy.determine_ddp_device_ids() == [0]
    strategy.parallel_devices = [torch.device("mps", 0)]
    with pytest.raises(InvalidInput, match="on CPUs and on GPUs of CUDA"):
        strategy._configure_launcher()


def test_a_scaler_of_fp16_skips_a_step_and_forgets_the_gradients_of_one_that_broke(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import lightning.pytorch as pl

    from spark_elastic.handwritten.data_loader import ElasticDataLoader
    from spark_elastic.integrations import trainer_adapter
    from spark_elastic.integrations.lightning import ElasticStrategy

    in_mid_step: list[bool] = []  # at the end of each batch

    class Net(type(make_net())):  # type: ignore[misc]
        breaks = True

        def training_step(self, batch: Any) -> Any:
            is_void = self.global_step == 1 or (self.breaks and self.global_step == 2)
            return self.linear(batch[0]).mean() * (float("inf") if is_void else 1.0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            """After the scaler has looked at the gradients: here a program may call collectives."""
            if self.breaks and self.global_step == 2:
                self.breaks = False
                raise Lost

        def on_train_batch_end(self, *args: Any) -> None:
            in_mid_step.append(self.trainer.strategy._adapter.state.in_mid_step())

    monkeypatch.setattr(trainer_adapter, "run", run_in_two_worlds)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    options = {"plugins": pl.plugins.MixedPrecision("16-mixed", "cpu", scaler), "default_root_dir": tmp_path}
    options |= {"strategy": ElasticStrategy(), "max_epochs": 1, "accumulate_grad_batches": 2, **QUIET}
    trainer = pl.Trainer(accelerator="cpu", **options)
    rows = torch.utils.data.TensorDataset(torch.ones(12, 4))
    trainer.fit(Net(), ElasticDataLoader(rows, global_batch_size=2))
    assert trainer.global_step == 3
    assert scaler.get_scale() == 2.0, "no step was skipped, or an infinity that is void has changed the scale"
    assert in_mid_step[:4] == [True, False] * 2, "a step that is skipped is over"


def make_net() -> Any:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any) -> Any:
            return self.linear(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Net()


def make_rows(count: int) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(3)))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_training_begins_in_mid_epoch_from_a_checkpoints_file(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    import spark_elastic.torch as hvd
    from spark_elastic.integrations.lightning import ElasticStrategy

    rows = make_rows(24)

    def fit(begin: Path | None) -> tuple[int, list[float]]:
        keeper = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        options: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "callbacks": [keeper]}
        trainer = pl.Trainer(accelerator="cpu", strategy=ElasticStrategy(), max_epochs=2, **options)
        net = make_net()
        trainer.fit(net, hvd.elastic.ElasticDataLoader(rows, BATCH), ckpt_path=begin)
        return trainer.global_step, net.linear.weight.detach().flatten().tolist()

    whole = fit(None)
    assert whole[0] == 8
    assert fit(tmp_path / "step=3.ckpt") == whole


def train_as_under_torch_distributor(folder: str, workers: int) -> dict[str, Any]:
    """Each worker is a node with one device, whatever else runs on its machine."""
    import lightning.pytorch as pl
    from accelerate import PartialState

    rows = make_rows(12)
    place: dict[str, Any] = {"devices": 1, "num_nodes": workers, "default_root_dir": folder}
    trainer = pl.Trainer(accelerator="cpu", strategy="ddp", max_epochs=1, **place, **QUIET)
    net = make_net()
    trainer.fit(net, torch.utils.data.DataLoader(rows, 3))
    return {
        "place": (trainer.global_rank, trainer.world_size, trainer.global_step),
        "accelerate": (PartialState().process_index, PartialState().num_processes),
        "weights": net.linear.weight.detach().flatten().tolist(),
    }


def test_functions_for_torch_distributor_and_a_bare_partial_state_see_all_workers(tmp_path: Path) -> None:
    results = Run(train_as_under_torch_distributor, (str(tmp_path), 2), **TWO).results()
    assert [result["place"] for result in results] == [(0, 2, 2), (1, 2, 2)]
    assert [result["accelerate"] for result in results] == [(0, 2), (1, 2)]
    assert results[0]["weights"] == results[1]["weights"]
