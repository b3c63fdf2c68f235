"""What a LightningModule is told, and what of it is refused since nothing would call it."""

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


class ModuleLikeLightning(torch.nn.Linear):
    """What a LightningModule has."""

    def training_step(self, batch: Any, number: int) -> Any:
        return self(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def take_step(model: torch.nn.Module, here: Position) -> Any:
    objective = LightningLoss(False, TrainerPlan(max_epochs=4, num_training_batches=10))
    objective.begin(GROUP, SHARE, here)
    return objective(model, SHARE)


@pytest.mark.parametrize(("phase", "global_step"), [(Phase.TRAIN, 23), (Phase.VALIDATE, 30)])
def test_a_module_sees_the_current_epoch_and_step(
    phase: Phase, global_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning, "local_rank", lambda: 3)
    told: list[Any] = []

    class ModuleAskingTrainer(ModuleLikeLightning):
        def training_step(self, batch: Any, number: int) -> Any:
            told.append((number, self._trainer))
            return super().training_step(batch, number)

    model = ModuleAskingTrainer(2, 1).train(phase is Phase.TRAIN)
    vars(model)["_trainer"] = None
    take_step(model, Position(2, phase, 3))
    ((number, trainer),) = told
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


def test_a_batch_is_mapped_as_the_tuple_that_it_is() -> None:
    seen: list[Any] = []

    class ModuleMappingBatch(ModuleLikeLightning):
        def training_step(self, batch: Any, number: int) -> Any:
            seen.append(tree_map(lambda tensor: tensor * 2, batch))
            return super().training_step(batch, number)

    take_step(ModuleMappingBatch(2, 1).train(), Position(0, Phase.TRAIN, 0))
    ((features, labels),) = seen
    assert torch.equal(features, 2 * SHARE.features[0])
    assert torch.equal(labels, 2 * SHARE.labels[0])


@pytest.mark.parametrize(
    ("name", "value", "how", "says"),
    [
        (
            "far",
            SimpleNamespace(compute=lambda: 1.0),
            {},
            "the metric SimpleNamespace",
        ),  # of one worker's rows
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
    [("optimizer_step", "on_train_epoch_start"), ("setup", "prepare_data"), ("validation_epoch_end",)],
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
