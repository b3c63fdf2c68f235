"""A LightningModule: what it is told, what of it is refused; the optimizer and the schedules of a training."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Phase, Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch import lightning
from spark_elastic.training.torch.lightning import LightningLoss, TrainerPlan, check_lightning
from spark_elastic.training.torch.spec import build_optimizer

SHARE = LocalBatch(3, np.arange(3), (torch.ones(3, 2),), (torch.zeros(3),), None)
GROUP: Any = SimpleNamespace(rank=1, size=4)
NET = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))


class ModuleLikeLightning(torch.nn.Linear):
    """What a LightningModule has."""

    def training_step(self, batch: Any, number: int) -> Any:
        return self(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def take_step(model: torch.nn.Module, here: Position) -> Any:
    objective = LightningLoss(False, TrainerPlan(max_epochs=4, num_training_batches=10), None, ())
    objective.begin(GROUP, SHARE, here)
    return objective(model, SHARE)


@pytest.mark.parametrize(("phase", "global_step"), [(Phase.TRAIN, 23), (Phase.VALIDATE, 30)])
def test_a_module_sees_the_current_epoch_and_step(phase: Phase, global_step: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(lightning, "local_rank", lambda: 3)
    told: list[Any] = []

    class ModuleAskingTrainer(ModuleLikeLightning):
        def training_step(self, batch: Any, number: int) -> Any:
            told.append((number, self._trainer, tree_map(lambda tensor: tensor * 2, batch)))
            return super().training_step(batch, number)

    model = ModuleAskingTrainer(2, 1).train(phase is Phase.TRAIN)
    vars(model)["_trainer"] = None
    take_step(model, Position(2, phase, 3))
    ((number, trainer, (features, _)),) = told
    assert torch.equal(features, 2 * SHARE.features[0]), "a batch is mapped as the tuple that it is"
    assert (number, trainer.current_epoch, trainer.global_step) == (3, 2, global_step)
    assert (trainer.max_epochs, trainer.estimated_stepping_batches) == (4, 40)
    assert (trainer.global_rank, trainer.local_rank, trainer.world_size) == (1, 3, 4)
    assert trainer.validating is (phase is Phase.VALIDATE)
    assert vars(model)["_trainer"] is None
    assert "log" not in vars(model)
    with pytest.raises(
        AttributeError,
        match=r"self.trainer has no strategy here: no Trainer runs .* are current_epoch, estimated_stepping_batches",
    ):
        assert trainer.strategy


@pytest.mark.parametrize(
    ("name", "value", "how", "says"),
    [
        ("far", SimpleNamespace(compute=lambda: 1.0), {}, "the metric Simple"),  # of one worker's rows
        ("rows", 3, {"reduce_fx": "sum"}, "reduce_fx='sum'"),
    ],
)
def test_logged_values_are_means(name: str, value: Any, how: dict[str, str], says: str) -> None:
    class Logs(ModuleLikeLightning):
        def training_step(self, batch: Any, number: int) -> Any:
            self.log_dict({"far": 1.0}, reduce_fx=torch.mean)  # type: ignore[operator]
            self.log(name, value, **how)  # type: ignore[operator]

    with pytest.raises(InvalidInput, match=rf"self.log\('{name}', ...\) was given {says}"):
        take_step(Logs(2, 1), Position(0, Phase.TRAIN, 0))


def test_a_step_may_return_a_dict_and_validation_one_without_a_loss() -> None:
    class ModuleReturningDict(ModuleLikeLightning):
        def training_step(self, batch: Any, number: int) -> Any:
            return {"far": torch.ones(())} if number else {"loss": self(batch[0]).mean(), "far": 1.0}

        def validation_step(self, batch: Any, number: int) -> Any:
            return {"far": torch.ones(())}

    model = ModuleReturningDict(2, 1)
    assert take_step(model, Position(0, Phase.TRAIN, 0)).denominator == len(SHARE)
    with pytest.raises(InvalidInput, match="training_step returned a dict of far: return the loss"):
        take_step(model, Position(0, Phase.TRAIN, 1))
    assert math.isnan(take_step(model.eval(), Position(0, Phase.VALIDATE, 0)).denominator)


@pytest.mark.parametrize(
    "hooks",
    [("on_train_epoch_start", "optimizer_step"), ("prepare_data", "setup"), ("validation_epoch_end",)],
)
def test_hooks_that_nothing_calls_are_named(hooks: tuple[str, ...]) -> None:
    check_lightning(ModuleLikeLightning(2, 1))
    hooked = type("Hooked", (ModuleLikeLightning,), {name: lambda self, *args: None for name in hooks})
    with pytest.raises(InvalidInput, match=f"defines {', '.join(hooks)}, which nothing calls"):
        check_lightning(hooked(2, 1))


def test_a_module_of_the_installed_lightning_trains() -> None:
    package = pytest.importorskip("pytorch_lightning")

    class LightningNet(package.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            self.log_dict({"epoch": self.current_epoch, "step": self.global_step, "number": number})
            self.log("rank", self.global_rank, prog_bar=True)
            assert self.logger is None
            return self.layer(batch[0])[:, 0]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            assert (self.global_rank, self.local_rank) == (0, 0)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    model = LightningNet().train()
    assert len(build_optimizer(model, None, None)[1]) == 1
    check_lightning(model)
    scored = take_step(model, Position(2, Phase.TRAIN, 3))
    means = {name: total / rows for name, (total, rows) in scored.logged.items()}
    assert means == {"epoch": 2.0, "step": 23.0, "number": 3.0, "rank": 1.0}
    assert scored.denominator == 3
    assert model.current_epoch == 0, "it has no trainer after the step"

    class ModuleClippingGradients(LightningNet):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.raises(InvalidInput, match="defines configure_gradient_clipping, which"):
        check_lightning(ModuleClippingGradients())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], lr=0.1)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("rate", "expected"), [(None, [0.8, 0.4]), (0.3, [1.2, 1.2])])
def test_the_learning_rate_of_each_parameter_group_is_scaled(rate: Any, expected: list[float]) -> None:
    optimizer, schedules = build_optimizer(NET, sgd, rate, 4)
    assert rates(optimizer) == pytest.approx(expected)
    assert schedules == ()


def chain_schedulers(optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=1)
    return schedulers.SequentialLR(optimizer, [warm, schedulers.ExponentialLR(optimizer, 0.5)], [2])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch), [0.5, 0.25, 0.125]),
        (lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=1), [0.05, 0.5, 0.5]),
        (chain_schedulers, [0.05, 0.5, 0.5, 0.25]),
    ],
)
def test_a_schedule_made_before_starts_from_the_rate_that_is_asked_for(schedule: Any, expected: Any) -> None:
    """Given, or multiplied."""
    for rate, times in ((0.5, 1), (None, 5)):
        optimizer = torch.optim.SGD(NET.parameters(), lr=0.1)
        scheduler = schedule(optimizer)
        model: Any = SimpleNamespace(configure_optimizers=lambda both=([optimizer], [scheduler]): both)
        _, (callback,) = build_optimizer(model, None, rate, times)
        callback.bind(optimizer)
        found = rates(optimizer)
        for _ in expected[1:]:
            optimizer.step()
            scheduler.step()
            found += rates(optimizer)
        assert found == pytest.approx(expected)


def configure_every(frequency: int) -> Any:
    optimizer = sgd(NET.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    each = {"scheduler": schedule, "interval": "epoch", "frequency": frequency}
    return {"optimizer": optimizer, "lr_scheduler": each}


@pytest.mark.parametrize(
    ("configure", "says"),
    [
        (lambda: configure_every(3), "a scheduler with frequency=3"),
        (
            lambda: [sgd(NET.parameters()), sgd(NET.parameters())],
            "configure_optimizers returned 2 optimizers: training takes one",
        ),
    ],
)
def test_rare_schedules_and_second_optimizers_are_refused(configure: Any, says: str) -> None:
    assert (
        len(build_optimizer(SimpleNamespace(configure_optimizers=lambda: configure_every(1)), None, None)[1])
        == 1
    )  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=says):
        build_optimizer(SimpleNamespace(configure_optimizers=configure), None, None)  # type: ignore[arg-type]


def test_a_schedule_may_ask_how_many_steps_there_will_be() -> None:
    class LinearWithScheduler(torch.nn.Linear):
        """As a LightningModule: its trainer is whatever somebody set."""

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            trainer: Any = self._trainer
            assert (trainer.max_epochs, trainer.current_epoch, trainer.global_step) == (3, 0, 0)
            assert (trainer.global_rank, trainer.local_rank) == (0, 0), "as of a module without a Trainer"
            with pytest.raises(AttributeError, match=r"self.trainer has no world_size here"):
                trainer.world_size  # noqa: B018 - which changes
            steps = trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=steps)]

    model = LinearWithScheduler(2, 1)
    plan = TrainerPlan(max_epochs=3, num_training_batches=7)
    optimizer, (callback,) = build_optimizer(model, None, None, trainer=plan)
    callback.bind(optimizer)
    assert callback._scheduler.total_steps == 21
    assert "_trainer" not in vars(model)
