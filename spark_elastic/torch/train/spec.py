"""What the user brings to a training with torch. Shipped to the workers; no thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spark_elastic.torch.callbacks import Callback
from spark_elastic.torch.train import identity
from spark_elastic.torch.train.lightning import LightningLoss
from spark_elastic.torch.train.objective import (
    FunctionLoss,
    ModelLoss,
    ModelLosses,
    Objective,
    TypesTold,
)
from spark_elastic.torch.trainer import TrainerPlan
from spark_elastic.training.identity import WEIGHTS, digest
from spark_elastic.training.spec import TrainSpec

Transformation = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Brought:
    """What the user brings.

    optimizer: over the model's parameters (pickled together with it), a function that makes one, or None with a
    LightningModule. losses: one of (output, *labels), or one per label with `loss_weights`; () where
    `train_minibatch_fn` or the model has its own. metrics: by name. transformation: of the columns of a part, by name.
    watched: numbers of an epoch that callbacks and schedules look at.
    """

    model: torch.nn.Module
    optimizer: Any
    losses: tuple[Callable[..., torch.Tensor], ...]
    loss_weights: tuple[float, ...] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callback, ...] = ()
    train_minibatch_fn: Callable[..., Any] | None = None
    transformation: Transformation | None = None
    watched: tuple[str, ...] = ()

    def identity(self) -> dict[str, str]:
        """What a run is bound to (R19), by the words that an error has for it."""
        return {
            "model": identity.of_module(self.model),
            "optimizer": identity.of_optimizer(self.model, self.optimizer),
            "loss": digest([*map(identity.of_loss, self.losses), self.loss_weights]),
            "train_minibatch_fn": digest(self.train_minibatch_fn),
            "transformation_fn": digest(self.transformation),
            "EarlyStopping or BestWeights": identity.of_callbacks(self.callbacks),
            "learning rate schedule": identity.of_schedules(self.model, self.optimizer, self.callbacks),
            WEIGHTS: identity.weights(self.model),
        }

    def objective(self, spec: TrainSpec) -> Objective:
        columns = [*(column.name for column in spec.features), *spec.labels]
        return TypesTold(self._objective(spec, columns), columns)

    def _objective(self, spec: TrainSpec, columns: list[str]) -> Objective:
        weighted = spec.weight is not None
        if self.train_minibatch_fn is not None:
            return FunctionLoss(self.train_minibatch_fn, weighted, spec.precision)
        if not self.losses:
            return LightningLoss(weighted, trainer_plan(spec), spec.precision, columns)
        if len(self.losses) == 1:
            return ModelLoss(self.losses[0], weighted, spec.precision, spec.labels)
        weights = self.loss_weights or (1.0 / len(self.losses),) * len(self.losses)
        pairs = zip(spec.labels, zip(self.losses, weights, strict=True), strict=True)
        return ModelLosses(dict(pairs), weighted, spec.precision)


def trainer_plan(spec: TrainSpec) -> TrainerPlan:
    """What a LightningModule may know of a training from its beginning."""
    return TrainerPlan(max_epochs=spec.epochs, num_training_batches=spec.plan.steps)
