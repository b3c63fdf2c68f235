"""The optimizer of a training: rates as given, as set, and multiplied once, schedules included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.training.torch.lightning import TrainerPlan
from spark_elastic.training.torch.spec import build_optimizer
from tests.unit.torch.loops import net


def sgd(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], lr=0.1)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("rate", "expected"), [(None, [0.8, 0.4]), (0.3, [1.2, 1.2])])
def test_the_learning_rate_of_each_parameter_group_is_scaled(
    rate: float | None, expected: list[float]
) -> None:
    optimizer, schedules = build_optimizer(net(), sgd, rate, 4)
    assert rates(optimizer) == pytest.approx(expected)
    assert schedules == ()


def test_a_schedule_made_beforehand_continues_from_the_multiplied_rates() -> None:
    optimizer = sgd(net().parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    model: Any = SimpleNamespace(configure_optimizers=lambda: ([optimizer], [schedule]))
    found, (callback,) = build_optimizer(model, None, None, 4)
    assert found is optimizer
    assert rates(optimizer) == pytest.approx([0.8, 0.4])
    callback.bind(optimizer)
    optimizer.step()
    schedule.step()
    assert rates(optimizer) == pytest.approx([0.4, 0.2])


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
def test_a_schedule_made_beforehand_starts_from_the_rate_that_is_asked_for(
    schedule: Any, expected: Any
) -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    scheduler = schedule(optimizer)
    model: Any = SimpleNamespace(configure_optimizers=lambda: ([optimizer], [scheduler]))
    _, (callback,) = build_optimizer(model, None, 0.5)
    callback.bind(optimizer)
    found = rates(optimizer)
    for _ in expected[1:]:
        optimizer.step()
        scheduler.step()
        found += rates(optimizer)
    assert found == pytest.approx(expected)


def test_a_schedule_that_is_advanced_every_few_epochs_is_refused() -> None:
    optimizer = sgd(net().parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    each = {"scheduler": schedule, "interval": "epoch", "frequency": 1}
    for frequency in (1, 3):
        settings = {"optimizer": optimizer, "lr_scheduler": each | {"frequency": frequency}}
        model: Any = SimpleNamespace(configure_optimizers=lambda found=settings: found)
        if frequency == 1:
            assert len(build_optimizer(model, None, None)[1]) == 1
        else:
            with pytest.raises(InvalidInput, match="a scheduler with frequency=3"):
                build_optimizer(model, None, None)


def test_a_model_of_two_optimizers_is_refused() -> None:
    both = [sgd(net().parameters()), sgd(net().parameters())]
    model: Any = SimpleNamespace(configure_optimizers=lambda: both)
    with pytest.raises(InvalidInput, match="configure_optimizers returned 2 optimizers: training takes one"):
        build_optimizer(model, None, None)


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
    optimizer, (callback,) = build_optimizer(
        model, None, None, trainer=TrainerPlan(max_epochs=3, num_training_batches=7)
    )
    callback.bind(optimizer)
    assert callback._scheduler.total_steps == 21
    assert "_trainer" not in vars(model)
