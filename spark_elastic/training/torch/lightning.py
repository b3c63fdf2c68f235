"""A LightningModule's own steps, optimizer and schedules. Duck-typed: Lightning is not imported. Main thread only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import register_pytree_node

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import read_later
from spark_elastic.gradients.process_sets import local_rank
from spark_elastic.protocol.types import START, Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.callbacks import Callback, LearningRateSchedule
from spark_elastic.training.torch.loss import LossFn, LossResult, RowLoss, autocast, return_loss, to_float32


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


TRIAL = TrainerPlan(max_epochs=10, num_training_batches=1000)  # for a trial, before the rows are counted


@contextmanager
def attach_trainer(model: Module, trainer: TrainerPlan, **others: Any) -> Iterator[None]:
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


def call_configure_optimizers(model: Any) -> tuple[Any, tuple[Callback, ...]]:
    """Return (optimizer, schedules) from a LightningModule's `configure_optimizers`, in each of its forms."""
    found = model.configure_optimizers()
    if isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], tuple | list):
        optimizers, schedulers = found
    elif isinstance(found, Mapping):
        optimizers, schedulers = [found], []
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


_PACKAGES = ("lightning.", "pytorch_lightning.")
# Methods that Lightning's Trainer calls around the steps of a fit; nothing calls them here.
_UNCALLED = re.compile(
    "backward|optimizer_step|optimizer_zero_grad|configure_gradient_clipping|lr_scheduler_step|setup|prepare_data"
    "|configure_(model|sharded_model|callbacks)|transfer_batch_to_device|on_(before|after)_batch_transfer"
    "|on_(save|load)_checkpoint|on_(fit|train|train_epoch|train_batch|validation|validation_epoch|validation_batch)_"
    "(start|end)|on_validation_model_(eval|train|zero_grad)|on_before_(zero_grad|backward|optimizer_step)"
    "|on_after_backward|(training|validation)_(step|epoch)_end"  # the last of Lightning 1
)


class Batch(tuple[Any, Any]):
    """(features, labels), each a tensor, or a tuple where there are several columns; `batch["x"]` is the column x."""

    columns: Mapping[str, Tensor]

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else super().__getitem__(key)


# torch's tree_map takes a subclass of tuple for one value, and would multiply it as a whole.
register_pytree_node(Batch, lambda batch: (list(batch), None), lambda parts, _: tuple(parts))


class LightningLoss(LossFn):
    """Calls a LightningModule's `training_step`, or its `validation_step`, if it has one, in evaluation mode. batch_idx
    is the step of the epoch, from 0. Logged numbers are averaged over rows. The whole step runs under autocast, as in
    Lightning."""

    logs = True

    def __init__(
        self, weighted: bool, plan: TrainerPlan, precision: str | None, columns: Sequence[str]
    ) -> None:
        self._plan, self._precision, self._columns = plan, precision, tuple(columns)
        self._loss = RowLoss(return_loss, weighted)
        self._logged: dict[str, float | Tensor] = {}
        self._position, self._rank, self._size = START, 0, 1

    def begin(self, group: Group, batch: LocalBatch[Tensor], position: Position) -> None:
        self._position, self._rank, self._size = position, group.rank, group.size

    def __call__(self, model: Module, part: LocalBatch[Tensor]) -> LossResult:
        batch = Batch(side[0] if len(side) == 1 else side for side in (part.features, part.labels))
        batch.columns = dict(zip(self._columns, (*part.features, *part.labels), strict=False))
        self._logged = {}
        evaluates = not model.training and _overrides(model, "validation_step")
        step: Any = model.validation_step if evaluates else model.training_step
        trainer = self._trainer(model.training)
        with attach_trainer(model, trainer, log=self._log, log_dict=self._log_all), autocast(self._precision):
            value = step(batch, self._position.step)
        logged = {name: (number * len(part), float(len(part))) for name, number in self._logged.items()}
        if isinstance(value, Mapping):
            if "loss" not in value and not evaluates:
                raise InvalidInput(
                    f"training_step returned a dict of {', '.join(map(str, value))}: return the loss, or a dict with "
                    "it as 'loss'."
                )
            value = value.get("loss")
        if value is None and evaluates:
            return LossResult(torch.zeros(()), math.nan, logged=logged)
        summed = self._loss(to_float32(value), part.labels, part.weights, part.on_host)
        return summed._replace(logged=logged)

    def _trainer(self, training: bool) -> TrainerStandIn:
        position, steps = self._position, self._plan.num_training_batches
        return TrainerStandIn(
            max_epochs=self._plan.max_epochs,
            num_training_batches=steps,
            current_epoch=position.epoch,
            global_step=position.epoch * steps + (position.step if training else steps),
            global_rank=self._rank,
            local_rank=local_rank(),
            world_size=self._size,
            training=training,
        )

    def _log(self, name: str, value: Any, *args: Any, reduce_fx: Any = "mean", **kwargs: Any) -> None:
        if callable(getattr(value, "compute", None)):
            raise InvalidInput(
                f"self.log({name!r}, ...) was given the metric {type(value).__name__}, which has seen the rows of one "
                "worker alone: log the number of this batch, that is what calling the metric returns."
            )
        if reduce_fx not in ("mean", torch.mean):
            raise InvalidInput(
                f"self.log({name!r}, ...) was given reduce_fx={reduce_fx!r}, and what is logged is averaged over the "
                "rows of all workers: log a mean, or leave it out."
            )
        is_number = isinstance(value, Tensor) and value.numel() == 1
        self._logged[name] = read_later(value) if is_number else float(value)

    def _log_all(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self._log(name, value, *args, **kwargs)


def is_lightning(model: Any) -> bool:
    """Whether a module brings its own step and optimizer, as LightningModules do."""
    return all(callable(getattr(model, name, None)) for name in ("training_step", "configure_optimizers"))


def check_lightning(model: Module) -> None:
    """Raises InvalidInput if the module optimizes by itself, or defines hooks that only Lightning's Trainer calls."""
    if not getattr(model, "automatic_optimization", True):
        raise InvalidInput(
            "the LightningModule has automatic_optimization = False: gradients are summed over the workers and applied "
            "for it, so return the loss from training_step and leave the optimizer's step to the training."
        )
    hooks = [name for name in dir(type(model)) if _UNCALLED.fullmatch(name) and _overrides(model, name)]
    if hooks:
        raise InvalidInput(
            f"the LightningModule defines {', '.join(hooks)}, which nothing calls here: move the work to "
            "__init__, training_step, validation_step or callbacks, and clipping to gradient_clip_norm or "
            "gradient_clip_value."
        )


def _overrides(model: Module, name: str) -> bool:
    """Lightning's own class has every hook, without content."""
    method = getattr(type(model), name, None)
    return method is not None and not str(getattr(method, "__module__", "")).startswith(_PACKAGES)
