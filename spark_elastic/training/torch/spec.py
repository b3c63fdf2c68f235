"""The user's objects of a torch training, their digests, the optimizer, and the batches that model and loss receive.

Digests are equal in every process, to compare a resumed run (R19, resuming a run); that of the weights may differ, if
no seed was set. They only read; where something must be built, it is built on a copy. Any thread.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.data.transformation import (
    Transformation,
    check_numbers,
    find_input_dtype,
    refuse_large_numbers,
)
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import DeviceCopier
from spark_elastic.gradients.module_state import multiply_rates, view_bytes
from spark_elastic.runs.identity import (
    NOTHING,
    NUMBERS,
    PLAIN,
    WEIGHTS,
    describe_class,
    digest,
    pick_comparable,
    to_text,
)
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.torch.callbacks import BestWeights, Callback, EarlyStopping, LearningRateSchedule
from spark_elastic.training.torch.lightning import (
    TRIAL,
    LightningLoss,
    TrainerPlan,
    attach_trainer,
    call_configure_optimizers,
)
from spark_elastic.training.torch.loss import (
    Batch,
    FunctionLoss,
    LossFn,
    ModelLoss,
    MultiOutputLoss,
    find_loss_module,
)

# ---- digests


def digest_module(module: Module) -> str:
    """Digest of a module's classes, their code, settings and shapes of tensors, without the values of its weights."""
    classes = {kind: describe_class(kind) for kind in {type(part) for part in module.modules()}}
    named = module.named_modules()
    parts = [(name, classes[type(part)], *sorted(_list_settings(part))) for name, part in named]
    tensors = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in _list_tensors(module)]
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return digest([parts, tensors, trained])


def digest_loss(loss: Any) -> str:
    """Digest of a loss function, or of a loss module with the values of its tensors, such as class weights."""
    loss = find_loss_module(loss)
    if not isinstance(loss, Module):
        return digest(loss)
    return digest([digest_module(loss), digest_weights(loss)])


def digest_optimizer(model: Module, given: Any) -> str:
    """Digest of an optimizer's class and the settings of its groups. given: as `TorchUserObjects.optimizer`."""
    is_optimizer = isinstance(given, Optimizer)
    optimizer = given if is_optimizer else build_optimizer(copy.deepcopy(model), given, None)[0]
    groups = [
        {k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    return digest([describe_class(type(optimizer)), groups])


def digest_callbacks(callbacks: tuple[Any, ...]) -> str:
    """Digest of the callbacks that end a training or choose its weights; a user's own callbacks cannot be compared."""
    kept = [each for each in callbacks if isinstance(each, EarlyStopping | BestWeights)]
    return digest([(describe_class(type(each)), *sorted(_list_settings(each))) for each in kept])


def digest_schedules(model: Module, given: Any, callbacks: tuple[Any, ...]) -> str:
    """Digest of the user's learning rate functions and of the schedulers that a LightningModule builds."""
    found = [to_text(each.binding) for each in callbacks if isinstance(each, LearningRateSchedule)]
    if given is None:
        optimizer, schedules = build_optimizer(copy.deepcopy(model), None, None)
        for each in schedules:
            assert isinstance(each, LearningRateSchedule)
            found.append(to_text([each.binding[1:], _describe_scheduler(each.binding[0](optimizer))]))
    return digest(found)


def _describe_scheduler(scheduler: Any) -> list[Any]:
    settings = {n: value for n, value in vars(scheduler).items() if n != "optimizer" and n[0] != "_"}
    inner = map(_describe_scheduler, getattr(scheduler, "_schedulers", ()))
    return [describe_class(type(scheduler)), settings, *inner]


def digest_weights(module: Module) -> str:
    hasher = hashlib.sha256()
    for name, tensor in _list_tensors(module):
        hasher.update(name.encode())
        hasher.update(view_bytes(tensor)[0].data)
    return hasher.hexdigest()[:16]


def _list_tensors(module: Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in module.state_dict().items() if isinstance(value, Tensor)]


def _list_settings(thing: Any) -> list[tuple[str, str]]:
    """Attributes that are numbers, arrays or functions; of torch's and this package's classes also strings, which in a
    user's class may be names of folders or dates."""
    own = type(thing).__module__.startswith(("torch.nn", "spark_elastic."))
    picked = {name: pick_comparable(value, PLAIN if own else NUMBERS) for name, value in vars(thing).items()}
    return [
        (name, to_text(value))
        for name, value in picked.items()
        if not name.startswith("_") and name != "training" and value is not NOTHING
    ]


# ---- objects


@dataclass(frozen=True)
class TorchUserObjects:
    model: Module  # may be a LightningModule
    # Over the model's parameters and pickled together with it, or a function that builds one; None: the model is a
    # LightningModule, which builds its own.
    optimizer: Any
    losses: tuple[Callable[..., Tensor], ...]  # for each label; (): the model computes the loss
    loss_weights: tuple[float, ...] = ()  # factor of each of several losses; (): there is at most one
    metrics: Mapping[str, Any] = field(default_factory=dict)  # functions or torchmetrics objects, by name
    callbacks: tuple[Callback, ...] = ()  # called in this order
    train_minibatch_fn: Callable[..., Any] | None = None  # the user's own forward pass and loss
    transformation: Transformation | None = None  # the user's function of the columns of a batch, by name
    watched: tuple[str, ...] = ()  # names of the numbers of an epoch that callbacks and schedules read
    activation: str | None = (
        None  # what makes probabilities of the outputs, by the loss; None: it does not say
    )

    def identity(self) -> dict[str, str]:
        """Digests of the objects that may not change later (R19, resuming a run), by the names that errors use."""
        return {
            "model": digest_module(self.model),
            "optimizer": digest_optimizer(self.model, self.optimizer),
            "loss": digest([*map(digest_loss, self.losses), self.loss_weights]),
            "train_minibatch_fn": digest(self.train_minibatch_fn),
            "transformation_fn": digest(self.transformation),
            "EarlyStopping or BestWeights": digest_callbacks(self.callbacks),
            "learning rate schedule": digest_schedules(self.model, self.optimizer, self.callbacks),
            WEIGHTS: digest_weights(self.model),
        }

    def loss_fn(self, spec: TrainSpec) -> LossFn:
        data, precision = spec.config.data, spec.config.optimizer.precision
        weighted = data.sample_weight_col is not None
        if self.train_minibatch_fn is not None:
            return FunctionLoss(self.train_minibatch_fn, weighted, precision)
        if not self.losses:
            columns = [*(column.name for column in spec.features), *data.label_cols]
            return LightningLoss(weighted, build_trainer_plan(spec), precision, columns)
        if len(self.losses) == 1:
            return ModelLoss(self.losses[0], weighted, precision, data.label_cols)
        losses = zip(self.losses, self.loss_weights, strict=True)
        return MultiOutputLoss(dict(zip(data.label_cols, losses, strict=True)), weighted, precision)


def build_trainer_plan(spec: TrainSpec) -> TrainerPlan:
    """The properties of a training that a LightningModule may read when it builds its optimizer."""
    return TrainerPlan(max_epochs=spec.config.data.epochs, num_training_batches=spec.plan.steps)


# ---- the optimizer


def build_optimizer(
    model: Module, given: Any, learning_rate: float | None, times: int = 1, trainer: TrainerPlan = TRIAL
) -> tuple[Optimizer, tuple[Callback, ...]]:
    """The optimizer, and the schedules that came with it. Raises InvalidInput: it cannot be used here.
    times: factor of the rates, also of those that a schedule starts from. trainer: for `configure_optimizers`."""
    schedules: tuple[Callback, ...] = ()
    if given is None:
        with attach_trainer(model, trainer):
            given, schedules = call_configure_optimizers(model)
    elif not isinstance(given, Optimizer):
        given = given(model.parameters())
    if not isinstance(given, Optimizer):
        raise InvalidInput(
            f"optimizer must return a torch optimizer when called with parameters; it returned {type(given).__name__}."
        )
    if learning_rate is not None:
        _set_rate(given, learning_rate)
    multiply_rates(given, times)
    return given, schedules


def check_steps_alone(optimizer: Optimizer) -> None:
    """Raises InvalidInput: a step of this optimizer, of a trial and without gradients, needs a closure, as LBFGS's."""
    try:
        optimizer.step()
    except Exception as error:  # it may fail for lack of what only a training has
        if "closure" in str(error):
            raise InvalidInput(
                f"optimizer is {type(optimizer).__name__}, whose step evaluates the loss several times (a closure): a "
                "step here has one forward and one backward pass, so use an optimizer whose step() needs no closure."
            ) from None


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of all groups; a schedule made before starts from it, and keeps its first factor."""
    for group in optimizer.param_groups:
        first = group.get("initial_lr")
        if not first or "max_lr" in group:  # OneCycleLR and CyclicLR set rates of their own
            group["lr"] = rate
        else:
            group["lr"], group["initial_lr"] = rate * (group["lr"] / first), rate


# ---- batches


class BatchBuilder:
    """Converts a step's columns to the tensors that model and loss receive, without a copy if shape and dtype fit. On
    another device than the CPU the tensors are still arriving when `build` returns."""

    def __init__(
        self,
        features: tuple[Column, ...],
        labels: tuple[str, ...],
        weight: str | None,
        dtype: torch.dtype,
        label_shapes: tuple[tuple[int, ...], ...] | None = None,
        reshapes: bool = True,
        copier: DeviceCopier | None = None,
    ) -> None:
        """features: in the shapes that the model takes. dtype: of the model; labels are float32 at least, since 16
        bits do not hold class 257. reshapes: False: a transformation chose the shapes. copier: None: the CPU."""
        self._features, self._labels, self._weight, self._copier = features, labels, weight, copier
        self._shared = {c.name for c in features} & set(labels)  # columns that are both
        self._dtype = dtype
        self._label_dtype = torch.promote_types(dtype, torch.float32)  # of floats, also of weights
        self._label_shapes, self._reshapes = label_shapes, reshapes
        self._used = [*(column.name for column in features), *labels]
        # Kinds of their arrays, as of the newest step, of which the batch had the memory itself; None: none so far.
        self._plain: list[tuple[Any, ...]] | None = None

    def build(self, rows: StepRows) -> Batch:
        arrays = [rows.columns[name] for name in self._used]
        kinds = [(array.dtype, array.shape[1:]) for array in arrays]
        if kinds != self._plain:
            batch = self._convert(rows)
            built = (*batch.features, *batch.labels)
            is_plain = (
                batch.weights is None and batch.on_host is None and all(map(_shares_memory, built, arrays))
            )
            self._plain = kinds if is_plain else None
            return batch
        tensors, count = tuple(map(torch.from_numpy, arrays)), len(self._features)
        return LocalBatch(rows.planned, rows.row_ids, tensors[:count], tensors[count:], None)

    def _convert(self, rows: StepRows) -> Batch:
        columns, copier = rows.columns, self._copier
        for name in self._used:
            check_numbers(name, columns[name])
        labels = self._label_tensors(columns)
        weights, dtype = None, self._label_dtype
        if self._weight is not None:
            weights = self._tensor(columns[self._weight], dtype).to(dtype)
        features = tuple(self._feature(columns[c.name], c.shape) for c in self._features)
        batch = LocalBatch(rows.planned, rows.row_ids, features, labels, weights)
        if copier is None:
            return batch
        sent = tuple(copier.copy(label, label.dtype) for label in labels)
        sent_weights = None if weights is None else copier.copy(weights, weights.dtype)
        return replace(batch, labels=sent, weights=sent_weights, on_host=(labels, weights))

    def _feature(self, array: npt.NDArray[Any], shape: tuple[int, ...]) -> Tensor:
        if self._copier is None:
            tensor = self._tensor(array, self._dtype)
        else:
            given = torch.from_numpy(refuse_large_numbers(array))
            tensor = self._copier.copy(given, _choose_dtype(given, self._dtype))
        return tensor.reshape(-1, *shape) if self._reshapes and tensor.shape[1:] != shape else tensor

    def _label_tensors(self, columns: Mapping[str, Any]) -> tuple[Tensor, ...]:
        pairs = [(name, self._tensor(columns[name], self._label_dtype)) for name in self._labels]
        # A copy if the column is a feature, too: the model may write to its features.
        tensors = tuple(tensor.clone() if name in self._shared else tensor for name, tensor in pairs)
        if self._label_shapes is None:
            return tensors
        return tuple(t.reshape(-1, *s) for t, s in zip(tensors, self._label_shapes, strict=True))

    def _tensor(self, array: npt.NDArray[np.generic], floats: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(refuse_large_numbers(array))
        dtype = _choose_dtype(tensor, floats)
        return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _shares_memory(tensor: Tensor, array: npt.NDArray[Any]) -> bool:
    return array.size > 0 and tensor.shape == array.shape and tensor.data_ptr() == array.ctypes.data


def _choose_dtype(tensor: Tensor, floats: torch.dtype) -> torch.dtype:
    """Floating point numbers become `floats`; integers, which are class labels or indices, become int64."""
    if tensor.dtype.is_floating_point:
        return floats
    return tensor.dtype if tensor.dtype is torch.bool else torch.int64


def make_batch_builder(
    spec: TrainSpec, objects: TorchUserObjects, model: Module, copier: DeviceCopier | None = None
) -> BatchBuilder:
    """The builder of the batches that this model, or a copy of it, trains on. copier: to a device but the CPU."""
    return BatchBuilder(
        spec.features,
        spec.config.data.label_cols,
        spec.config.data.sample_weight_col,
        find_input_dtype(model.parameters(), torch.get_default_dtype()),
        spec.config.data.label_shapes,
        reshapes=objects.transformation is None,
        copier=copier,
    )
