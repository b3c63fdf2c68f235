"""The loss of a LightningModule, by its own steps. Duck-typed: Lightning is not imported. Main thread only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import read_later
from spark_elastic.gradients.process_sets import local_rank
from spark_elastic.protocol.types import START, Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.build_optimizer import TrainerPlan, TrainerStandIn, attach_trainer
from spark_elastic.training.torch.loss import LossResult, RowLoss, autocast, return_loss, to_float32

_PACKAGES = ("lightning.", "pytorch_lightning.")
# Methods that Lightning's Trainer calls around the steps of a fit; nothing calls them here.
_UNCALLED = (
    *(
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "lr_scheduler_step",
    ),
    *("setup", "prepare_data", "configure_model", "configure_sharded_model", "configure_callbacks"),
    *("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
    *("on_save_checkpoint", "on_load_checkpoint"),
    *(
        f"on_{what}_{when}"
        for what in ("fit", "train", "train_epoch", "train_batch")
        for when in ("start", "end")
    ),
    *(f"on_validation{what}_{when}" for what in ("", "_epoch", "_batch") for when in ("start", "end")),
    *("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    # Of Lightning 1.
    *(f"{what}_{when}_end" for what in ("training", "validation") for when in ("step", "epoch")),
)


class Batch(tuple[Any, Any]):
    """(features, labels), each a tensor, or a tuple where there are several columns; `batch["x"]` is the column x."""

    columns: Mapping[str, torch.Tensor]

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else super().__getitem__(key)


# torch's tree_map takes a subclass of tuple for one value, and would multiply it as a whole.
register_pytree_node(Batch, lambda batch: (list(batch), None), lambda parts, _: tuple(parts))


class LightningLoss:
    """Calls a LightningModule's `training_step`, or its `validation_step`, if it has one, in evaluation mode.

    batch_idx is the step of the epoch, from 0. Logged numbers are averaged over rows. The whole step runs under
    autocast, as in Lightning.
    """

    logs = True

    def __init__(
        self,
        weighted: bool,
        plan: TrainerPlan,
        precision: str | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        """columns: names of the features, then of the labels."""
        self._precision = precision
        self._plan = plan
        self._columns = tuple(columns)
        self._loss = RowLoss(return_loss, weighted)
        self._logged: dict[str, float | torch.Tensor] = {}
        self._position, self._rank, self._size = START, 0, 1

    def begin(self, group: Group, batch: LocalBatch[torch.Tensor], position: Position) -> None:
        self._position, self._rank, self._size = position, group.rank, group.size

    def __call__(self, model: torch.nn.Module, part: LocalBatch[torch.Tensor]) -> LossResult:
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
        return LossResult(summed.total, summed.denominator, logged=logged)

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
                f"worker alone: log the number of this batch, that is what calling the metric returns."
            )
        if reduce_fx not in ("mean", torch.mean):
            raise InvalidInput(
                f"self.log({name!r}, ...) was given reduce_fx={reduce_fx!r}, and what is logged is averaged over the "
                "rows of all workers: log a mean, or leave it out."
            )
        is_number = isinstance(value, torch.Tensor) and value.numel() == 1
        self._logged[name] = read_later(value) if is_number else float(value)

    def _log_all(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self._log(name, value, *args, **kwargs)


def is_lightning(model: Any) -> bool:
    """Whether a module brings its own step and optimizer, as LightningModules do."""
    return all(callable(getattr(model, name, None)) for name in ("training_step", "configure_optimizers"))


def check_lightning(model: torch.nn.Module) -> None:
    """Raises InvalidInput if the module optimizes by itself, or defines hooks that only Lightning's Trainer calls."""
    if not getattr(model, "automatic_optimization", True):
        raise InvalidInput(
            "the LightningModule has automatic_optimization = False: gradients are summed over the workers and applied "
            "for it, so return the loss from training_step and leave the optimizer's step to the training."
        )
    hooks = [name for name in _UNCALLED if _overrides(model, name)]
    if hooks:
        raise InvalidInput(
            f"the LightningModule defines {', '.join(hooks)}, which nothing calls here: move the work to "
            "__init__, training_step, validation_step or callbacks, and clipping to gradient_clip_norm or "
            "gradient_clip_value."
        )


def _overrides(model: torch.nn.Module, name: str) -> bool:
    """Lightning's own class has every hook, without content."""
    method = getattr(type(model), name, None)
    return method is not None and not str(getattr(method, "__module__", "")).startswith(_PACKAGES)
