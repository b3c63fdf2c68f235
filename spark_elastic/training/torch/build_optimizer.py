"""Builds the optimizer and the schedules of a training from what the user gave. No thread, no group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.training.torch.callbacks import Callback, LearningRateSchedule


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """Stands in for a LightningModule's `self.trainer` in `configure_optimizers`, before the first step."""

    max_epochs: int  # of the fit
    num_training_batches: int  # steps of an epoch
    current_epoch: int = 0  # from 0
    global_step: int = 0  # optimizer steps since the training began, in all worlds
    global_rank: int = 0  # ranks are 0 until there is a world, as in Lightning without a Trainer
    local_rank: int = 0  # as `global_rank`
    logger: None = None  # Lightning's; there is none
    loggers: tuple[()] = ()  # as `logger`

    @property
    def estimated_stepping_batches(self) -> int:
        """The steps of the whole training."""
        return self.max_epochs * self.num_training_batches

    def __getattr__(self, name: str) -> Any:
        names = sorted(known for known in {*vars(self), *dir(type(self))} if known[0] != "_")
        raise AttributeError(
            f"self.trainer has no {name} here: no Trainer runs this LightningModule; there are {', '.join(names)}."
        )


@dataclass(frozen=True, kw_only=True)
class TrainerStandIn(TrainerPlan):
    """Stands in for `self.trainer` in a step: also knows the world that takes it, and whether it trains."""

    world_size: int  # of the world that takes the step
    training: bool  # False: it validates
    sanity_checking: bool = False  # never: no validation comes before the training

    @property
    def validating(self) -> bool:
        return not self.training

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0


# For a trial on the driver, before the rows are counted.
TRIAL = TrainerPlan(max_epochs=10, num_training_batches=1000)


@contextmanager
def attach_trainer(model: torch.nn.Module, trainer: TrainerPlan, **others: Any) -> Iterator[None]:
    """Set instance attributes inside the block: the module's own `trainer` and `log` require a Trainer that runs it."""
    attributes: Any = {"_trainer": trainer, **others}
    own: Any = vars(model)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def build_optimizer(
    model: torch.nn.Module,
    given: Any,
    learning_rate: float | None,
    times: int = 1,
    trainer: TrainerPlan = TRIAL,
) -> tuple[torch.optim.Optimizer, tuple[Callback, ...]]:
    """Return (the optimizer, the schedules that came with it).

    Args:
        given: `TorchUserObjects.optimizer`.
        learning_rate: of all groups.
        times: factor of the rates, also of those that a schedule made before starts from.
        trainer: the module's `self.trainer` in `configure_optimizers`.

    Raises:
        InvalidInput: the optimizer cannot be used here; the sentence says why.
    """
    schedules: tuple[Callback, ...] = ()
    if given is None:
        with attach_trainer(model, trainer):
            given, schedules = _call_configure_optimizers(model)
    elif not isinstance(given, torch.optim.Optimizer):
        given = given(model.parameters())
    if not isinstance(given, torch.optim.Optimizer):
        raise InvalidInput(
            f"optimizer must return a torch optimizer when called with parameters; it returned {type(given).__name__}."
        )
    if learning_rate is not None:
        _set_rate(given, learning_rate)
    multiply_rates(given, times)
    return given, schedules


def check_steps_alone(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step needs a closure, such as LBFGS or SAM.

    Args:
        optimizer: of a trial, without gradients.

    Raises:
        InvalidInput: its step needs a closure.
    """
    try:
        optimizer.step()
    except Exception as error:  # it may fail for lack of what only a training has
        if "closure" in str(error):
            raise InvalidInput(
                f"optimizer is {type(optimizer).__name__}, whose step evaluates the loss several times (a closure): a "
                "step here has one forward and one backward pass, so use an optimizer whose step() needs no closure."
            ) from None


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups; a schedule made before starts from it, and keeps its first factor."""
    for group in optimizer.param_groups:
        first = group.get("initial_lr")
        if not first or "max_lr" in group:  # OneCycleLR and CyclicLR set rates of their own
            group["lr"] = rate
        else:
            group["lr"], group["initial_lr"] = rate * (group["lr"] / first), rate


def multiply_rates(optimizer: torch.optim.Optimizer, times: int) -> None:
    """Multiply every group's learning rate, and the first rate that a scheduler made before has noted."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * times


def _call_configure_optimizers(model: Any) -> tuple[Any, tuple[Callback, ...]]:
    """Return (optimizer, schedules) from a LightningModule's `configure_optimizers`, in each of its forms."""
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
    scheduler, frequency = settings["scheduler"], settings.get("frequency", 1)
    if frequency != 1:
        raise InvalidInput(
            f"configure_optimizers asks for a scheduler with frequency={frequency!r}: here it is advanced after every "
            "epoch or step, so leave frequency out and give the scheduler a step_size, or a gamma, to match."
        )
    return LearningRateSchedule(
        lambda optimizer: _rebase_schedule(scheduler, optimizer),
        settings.get("interval", "epoch"),
        settings.get("monitor"),
    )


def _rebase_schedule(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Let the scheduler, and those that it is made of, start from the present rates of the optimizer."""
    firsts = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if hasattr(part, "base_lrs") and "max_lr" not in optimizer.param_groups[0]:
            part.base_lrs = list(firsts)
    return scheduler
