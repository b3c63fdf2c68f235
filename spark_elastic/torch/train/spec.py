"""What the user brings to a training with torch. Shipped to the workers; no thread."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.torch.callbacks import BestWeights, Callback, EarlyStopping, LearningRateSchedule
from spark_elastic.torch.optimizers import TrainerPlan, build_optimizer
from spark_elastic.torch.train.lightning import LightningLoss
from spark_elastic.torch.train.loss import (
    DtypeHints,
    FunctionLoss,
    LossFn,
    ModelLoss,
    MultiOutputLoss,
    module_of,
)
from spark_elastic.training.batch import LocalBatch, transform_columns
from spark_elastic.training.identity import PLAIN, WEIGHTS, digest, text
from spark_elastic.training.spec import TrainSpec

# What the torch objects of a training are, as digests that are the same in every process (R19).
#
# The weights that a model begins with are none of it: they are another draw in each process that sets no seed, and such
# a run must go on, too. Looks only, at copies where something has to be made. Any thread.


def of_module(module: torch.nn.Module) -> str:
    """Classes, settings and tensors' shapes; no weights."""
    parts = [(name, type(part).__name__, *sorted(_settings(part))) for name, part in module.named_modules()]
    tensors = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in _tensors(module)]
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return digest([parts, tensors, trained])


def of_loss(loss: Any) -> str:
    """A loss's tensors, class weights for example, are part of it."""
    loss = module_of(loss)
    if not isinstance(loss, torch.nn.Module):
        return digest(loss)
    return digest([of_module(loss), weights(loss)])


def of_optimizer(model: torch.nn.Module, given: Any) -> str:
    """Its class and the settings of its groups. given: as `TorchUserObjects.optimizer`."""
    ready = isinstance(given, torch.optim.Optimizer)
    optimizer = given if ready else build_optimizer(copy.deepcopy(model), given, None)[0]
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return digest([type(optimizer).__name__, groups])


def of_callbacks(callbacks: tuple[Any, ...]) -> str:
    """Of those that end a training or choose its weights; what a user's own does cannot be known."""
    found = [each for each in callbacks if isinstance(each, EarlyStopping | BestWeights)]
    return digest([(type(each).__name__, *sorted(_settings(each))) for each in found])


def of_schedules(model: torch.nn.Module, given: Any, callbacks: tuple[Any, ...]) -> str:
    """Of learning rates: the user's functions that make them, and the schedulers that a LightningModule makes."""
    found = [text(each.binding) for each in callbacks if isinstance(each, LearningRateSchedule)]
    if given is None:
        optimizer, schedules = build_optimizer(copy.deepcopy(model), None, None)
        for each in schedules:
            assert isinstance(each, LearningRateSchedule)
            found.append(text([each.binding[1:], _of_scheduler(each.binding[0](optimizer))]))
    return digest(found)


def _of_scheduler(scheduler: Any) -> list[Any]:
    """Its class, settings and functions, and of those that it is made of."""
    settings = {
        name: held for name, held in vars(scheduler).items() if name != "optimizer" and name[0] != "_"
    }
    return [type(scheduler).__name__, settings, *map(_of_scheduler, getattr(scheduler, "_schedulers", ()))]


def weights(module: torch.nn.Module) -> str:
    """16 hex digits of every number of the state."""
    found = hashlib.sha256()
    for name, tensor in _tensors(module):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, held) for name, held in module.state_dict().items() if isinstance(held, torch.Tensor)]


def _settings(thing: Any) -> list[tuple[str, str]]:
    """Numbers for all (a user's strings may be a folder's or a day's name), strings for torch's own modules."""
    own = type(thing).__module__.startswith(("torch.nn", "spark_elastic."))
    return [
        (name, text(value))
        for name, value in vars(thing).items()
        if not name.startswith("_") and name != "training" and _tells(value, own)
    ]


def _tells(value: Any, strings: bool) -> bool:
    if isinstance(value, list | tuple):
        return all(_tells(each, strings) for each in value)
    return isinstance(value, PLAIN if strings else (bool, int, float))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


Transformation = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class TorchUserObjects:
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
            "model": of_module(self.model),
            "optimizer": of_optimizer(self.model, self.optimizer),
            "loss": digest([*map(of_loss, self.losses), self.loss_weights]),
            "train_minibatch_fn": digest(self.train_minibatch_fn),
            "transformation_fn": digest(self.transformation),
            "EarlyStopping or BestWeights": of_callbacks(self.callbacks),
            "learning rate schedule": of_schedules(self.model, self.optimizer, self.callbacks),
            WEIGHTS: weights(self.model),
        }

    def loss_fn(self, spec: TrainSpec) -> LossFn:
        columns = [*(column.name for column in spec.features), *spec.config.label_cols]
        return DtypeHints(self._select_loss(spec, columns), columns)

    def _select_loss(self, spec: TrainSpec, columns: list[str]) -> LossFn:
        weighted = spec.config.sample_weight_col is not None
        if self.train_minibatch_fn is not None:
            return FunctionLoss(self.train_minibatch_fn, weighted, spec.config.precision)
        if not self.losses:
            return LightningLoss(weighted, trainer_plan(spec), spec.config.precision, columns)
        if len(self.losses) == 1:
            return ModelLoss(self.losses[0], weighted, spec.config.precision, spec.config.label_cols)
        weights = self.loss_weights or (1.0 / len(self.losses),) * len(self.losses)
        pairs = zip(spec.config.label_cols, zip(self.losses, weights, strict=True), strict=True)
        return MultiOutputLoss(dict(pairs), weighted, spec.config.precision)


def trainer_plan(spec: TrainSpec) -> TrainerPlan:
    """What a LightningModule may know of a training from its beginning."""
    return TrainerPlan(max_epochs=spec.config.epochs, num_training_batches=spec.plan.steps)


# Columns of a step as the tensors that model and loss take: shapes and dtypes, without a copy where both fit.


class BatchBuilder:
    """Which columns are what. features: as the model sees them (their shapes may differ from the stored ones)."""

    def __init__(
        self,
        features: tuple[Column, ...],
        labels: tuple[str, ...],
        weight: str | None,
        dtype: torch.dtype,
        label_shapes: tuple[tuple[int, ...], ...] | None = None,
        transformation: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        """dtype: of the model's floating point parameters; floating point columns are cast to it. transformation: of
        arrays by column, (rows, *shape) each; what it returns is taken in the shapes that it has."""
        self._features = features
        self._labels = labels
        self._weight = weight
        self._wanted = [c.name for c in features] + [*labels, *filter(None, [weight])]
        self._shared = {c.name for c in features} & set(labels)  # columns that are both
        self._dtype = dtype
        self._label_shapes = label_shapes
        self._transformation = transformation

    def build(self, rows: StepRows) -> LocalBatch[torch.Tensor]:
        columns = transform_columns(rows, self._wanted, self._transformation)
        return LocalBatch(
            planned=rows.planned,
            row_ids=rows.row_ids,
            features=tuple(self._feature(columns[c.name], c.shape) for c in self._features),
            labels=self._label_tensors(columns),
            weights=None if self._weight is None else self._tensor(columns[self._weight]).to(self._dtype),
        )

    def _feature(self, array: npt.NDArray[Any], shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensor(array)
        return tensor if self._transformation is not None else tensor.reshape(-1, *shape)

    def _label_tensors(self, columns: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        tensors = tuple(self._label(name, columns[name]) for name in self._labels)
        if self._label_shapes is None:
            return tensors
        return tuple(t.reshape(-1, *s) for t, s in zip(tensors, self._label_shapes, strict=True))

    def _label(self, name: str, array: npt.NDArray[Any]) -> torch.Tensor:
        """Of its own memory where the column is a feature, too, which a model may write to."""
        tensor = self._tensor(array)
        return tensor.clone() if name in self._shared else tensor

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Floating point numbers in the model's dtype, integers as int64, as class labels and indices are."""
        tensor = torch.from_numpy(array)
        if tensor.is_floating_point():
            return tensor.to(self._dtype)
        return tensor if tensor.dtype is torch.bool else tensor.to(torch.int64)
