"""The optimizer and the schedules of a training, from whatever form the user gave them in. No thread, no group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.torch.callbacks import Callback, LearningRateSchedule


def made(
    model: torch.nn.Module, given: Any, learning_rate: float | None
) -> tuple[torch.optim.Optimizer, tuple[Callback, ...]]:
    """(the optimizer, schedules that came with it). given: as `Brought.optimizer`; learning_rate: of all groups.

    Raises:
        InvalidInput: it cannot be used here; the sentence says why.
    """
    schedules: tuple[Callback, ...] = ()
    if given is None:
        given, schedules = _configured(model)
    elif not isinstance(given, torch.optim.Optimizer):
        given = given(model.parameters())
    if not isinstance(given, torch.optim.Optimizer):
        raise InvalidInput(
            f"optimizer must return a torch optimizer when called with parameters; it returned {type(given).__name__}."
        )
    if isinstance(given, torch.optim.LBFGS):
        raise InvalidInput(
            "optimizer is LBFGS, whose step evaluates the loss several times (a closure): a step here has one forward "
            "and one backward pass, so use an optimizer whose step() needs no closure."
        )
    if learning_rate is not None:
        for group in given.param_groups:
            group["lr"] = learning_rate
    return given, schedules


def _configured(model: Any) -> tuple[Any, tuple[Callback, ...]]:
    """What a LightningModule's `configure_optimizers` returns, in each of its forms."""
    found = model.configure_optimizers()
    if isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], tuple | list):
        optimizers, schedulers = found
    elif isinstance(found, Mapping):
        optimizers, schedulers = (
            [found["optimizer"]],
            [found["lr_scheduler"]] if "lr_scheduler" in found else [],
        )
    else:
        optimizers, schedulers = (found if isinstance(found, tuple | list) else [found]), []
    if len(optimizers) != 1:
        raise InvalidInput(f"configure_optimizers returned {len(optimizers)} optimizers: training takes one.")
    optimizer = optimizers[0]
    if isinstance(optimizer, Mapping):
        schedulers = [optimizer["lr_scheduler"]] if "lr_scheduler" in optimizer else []
        optimizer = optimizer["optimizer"]
    return optimizer, tuple(_schedule(scheduler) for scheduler in schedulers)


def _schedule(given: Any) -> LearningRateSchedule:
    settings = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = settings["scheduler"]
    return LearningRateSchedule(
        lambda optimizer: scheduler, settings.get("interval", "epoch"), settings.get("monitor")
    )
