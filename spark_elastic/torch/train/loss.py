"""What a step minimises: model, losses and labels put together, for one part of a rank's rows.

Each form gives a sum over rows with a graph and what it is divided by (R8), so that any split of a batch gives the same
gradient. Knows no loop. Main thread only.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.loss import CTCLoss, _Loss
from torch.utils._pytree import tree_map_only

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.protocol.types import Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.trainer import output_parts

# Sums of per-row losses, and what to divide them by, so that any split of a batch gives the same gradient (R8).
#
# A loss is a torch loss module, or a function of (output, label, ...) that returns one number per row or their plain
# mean; one that divides by something else is known by torch's own name, or by a `partial` of it. Each call gives (sum,
# denominator): over all ranks and micro-batches, sum(sums) / sum(denominators) is the loss that one process would have
# computed for the whole batch.


# A function that returns a mean hides what it divided by; the module of the same name does not.
_MODULES: dict[Callable[..., torch.Tensor], type[_Loss]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
# Those that compare number by number, where a label per row and an output of one column can only mean each other.
_ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
)  # fmt: skip


@dataclass(frozen=True)
class LossSum:
    """total: 0-dim tensor with a graph. denominator: this part's share of the divisor; 0 in every part of a loss that
    the user wants summed, not averaged."""

    total: torch.Tensor
    denominator: float


def find_loss_module(loss: Any) -> Any:
    """The module of one of torch's functions, or of a `functools.partial` of it; any other loss as it is.

    Raises:
        InvalidInput: the partial holds what the module does not take.
    """
    module = _loss_class(loss)
    if module is None:
        return loss
    if not isinstance(loss, functools.partial):
        return module()
    try:
        return module(**loss.keywords)
    except TypeError:
        raise InvalidInput(
            f"loss is a partial of {loss.func.__name__} with {', '.join(loss.keywords)}, which {module.__name__} does "
            "not take: pass a function that returns one loss per row."
        ) from None


def is_elementwise(loss: Any) -> bool:
    """Whether it is one of torch's that compare number by number, whatever its settings."""
    return (_loss_class(loss) or type(loss)) in _ELEMENTWISE


def _loss_class(loss: Any) -> type[_Loss] | None:
    """Of which module one of torch's functions, or a `partial` of it, has the name."""
    function = loss.func if isinstance(loss, functools.partial) and not loss.args else loss
    return _MODULES.get(function) if isinstance(function, FunctionType) else None


class RowLoss:
    """Wraps the user's loss, which is never changed. weighted: rows carry sample weights."""

    def __init__(
        self,
        loss: Callable[..., torch.Tensor],
        weighted: bool = False,
        label: str = "label",
        ahead: bool = False,
    ) -> None:
        """label: the name of its first label's column. ahead: `denominator` is asked before there is an output."""
        loss = find_loss_module(loss)
        held = loss.keywords if isinstance(loss, functools.partial) else {}
        reduction = getattr(loss, "reduction", held.get("reduction"))
        self._weighted, self._label, self._ahead = weighted, label, ahead
        self._summed = reduction == "sum"
        self._per_row_sums = reduction in ("sum", "batchmean")
        self._loss = loss
        # CTC's mean divides every row by the length of its own label, which its "none" does not.
        if isinstance(loss, _Loss) and not isinstance(loss, CTCLoss):
            self._loss = copy.deepcopy(loss)
            self._loss.reduction = "none"
        self._of_classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        self._elementwise = is_elementwise(loss)

    def __call__(
        self, output: torch.Tensor, labels: tuple[torch.Tensor, ...], weights: torch.Tensor | None
    ) -> LossSum:
        """labels: one tensor per label column, (n, ...). weights: (n,) or None. A loss of torch's that compares number
        by number takes labels (n,) against an output (n, 1), as Horovod's estimator and Keras do, and labels of any
        kind of number; one of classes takes their numbers as floats, too, as Spark's StringIndexer gives them, and
        those of a sequence's tokens, (n, t), against an output (n, C, t).

        Raises:
            InvalidInput: sample weights are given, and the loss returns no number per row; a class that is no whole
                number.
        """
        rows = len(labels[0])
        labels = self._classes(labels, output)
        value = self._loss(output, *self._fitting(output, labels))
        self._check(value, output, labels)
        if value.ndim == 0:
            if self._weighted:
                raise InvalidInput(
                    "sample_weight_col needs a loss of one number per row: use a torch loss module, or return a "
                    "tensor of one loss per row instead of their mean."
                )
            return LossSum(value, 0.0) if self._summed else LossSum(value * rows, float(rows))
        per_row = self._by_row(value, labels[0], rows)
        if weights is not None:
            per_row = per_row * weights
        return LossSum(per_row.sum(), self.denominator(labels, weights))

    def denominator(self, labels: tuple[torch.Tensor, ...], weights: torch.Tensor | None) -> float:
        """What `__call__` would divide by, known without the model's output."""
        if self._summed:
            return 0.0
        labels = self._classes(labels)
        if weights is None and not self._by_class(labels[0]):
            return float(len(labels[0]))
        divisors = torch.ones(len(labels[0]), dtype=torch.float64)
        if self._by_class(labels[0]):
            divisors = self._class_divisors(labels[0]).reshape(len(divisors), -1).sum(1)
        return float((divisors if weights is None else divisors * weights).sum())

    def _classes(self, labels: tuple[torch.Tensor, ...], output: Any = None) -> tuple[torch.Tensor, ...]:
        """Numbers of classes as torch wants them; shares of classes as they are, which have as many dimensions as the
        output. Without the output arrays of floats are taken for shares."""
        label = labels[0]
        if not self._of_classes:
            return labels
        if isinstance(self._loss, nn.CrossEntropyLoss) and label.is_floating_point() and label.ndim > 1:
            if not isinstance(output, torch.Tensor) or output.ndim == label.ndim:
                return labels
            if self._ahead:
                raise InvalidInput(
                    f"column {self._label!r} has arrays of classes as {str(label.dtype).removeprefix('torch.')}, which "
                    "with several losses must be whole numbers: cast it to array<int>."
                )
        whole = label.to(torch.int64)
        if label.is_floating_point() and not torch.equal(whole.to(label.dtype), label):
            wrong = float(label[whole.to(label.dtype) != label][0])
            raise InvalidInput(
                f"column {self._label!r} has {wrong:g}, and {type(self._loss).__name__} takes whole numbers of "
                "classes: number the classes from 0, or give arrays of shares of each class."
            )
        return whole, *labels[1:]

    def _fitting(self, output: Any, labels: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        label = labels[0]
        if not self._elementwise or not isinstance(output, torch.Tensor):
            return labels
        if not label.is_floating_point():
            label = label.to(output.dtype)
        if output.shape == (len(label), 1) and label.ndim == 1:
            label = label.unsqueeze(1)
        return label, *labels[1:]

    def _check(self, value: Any, output: Any, labels: tuple[torch.Tensor, ...]) -> None:
        rows = len(labels[0])
        if not isinstance(value, torch.Tensor):
            raise InvalidInput(
                f"the loss returned {type(value).__name__}: return a tensor, of one loss per row or their mean."
            )
        if not value.ndim:
            return
        if len(value) != rows:
            raise InvalidInput(
                f"the loss returned {len(value)} numbers for {rows} rows: return one per row, or their mean."
            )
        outputs = [part for part in output_parts(output) if isinstance(part, torch.Tensor)]
        most = sum(part.numel() for part in outputs)
        if not isinstance(self._loss, _Loss):
            most = max(most, *(label.numel() for label in labels))
        if value.numel() > max(most, rows):
            shapes = " and ".join(str(tuple(part.shape)) for part in outputs)
            raise InvalidInput(
                f"the loss made {tuple(value.shape)} out of the model's output {shapes} and labels "
                f"{tuple(labels[0].shape)}: give output and label the same shape."
            )

    def _by_row(self, value: torch.Tensor, label: torch.Tensor, rows: int) -> torch.Tensor:
        """(n,) losses."""
        if value.ndim == 1:
            return value
        flat = value.reshape(rows, -1)
        return flat.sum(1) if self._per_row_sums or self._by_class(label) else flat.mean(1)

    def _by_class(self, label: torch.Tensor) -> bool:
        """Whether the loss divides by the weights of the labels' classes."""
        return self._of_classes and not label.is_floating_point()

    def _class_divisors(self, label: torch.Tensor) -> torch.Tensor:
        """What torch divides by in its mean: the class weights of the labels, nothing for ignored ones."""
        loss = self._loss
        assert isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        counted = label != loss.ignore_index
        if loss.weight is None:
            return counted.to(torch.float64)
        weights = loss.weight.to(torch.float64)
        return torch.where(counted, weights[torch.where(counted, label, 0)], 0.0)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LossResult:
    """total, denominator: as `LossSum`; a denominator that is no number: there is no loss to look at. outputs: of the
    model, detached, one per label or one for all; () where only the loss is known. logged: other numbers of these rows
    by name, their means."""

    total: torch.Tensor
    denominator: float
    outputs: tuple[torch.Tensor, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict)


class LossFn(Protocol):
    """Called for each micro-batch of a step. Every rank calls `begin` first. logs: `LossResult.logged` is in use."""

    logs: bool

    def begin(self, group: Group, share: LocalBatch[torch.Tensor], here: Position) -> None: ...

    def __call__(self, model: torch.nn.Module, part: LocalBatch[torch.Tensor]) -> LossResult: ...


# Of torch's errors where a layer, or a loss, is given numbers of a type that it does not take. A tensor that any other
# error shows may have a "dtype=".
_OF_TYPES = re.compile(
    r"\b(dtype(?!=)|datatype|scalar types?|[Ii]nput type|result type)\b|not implemented for '(Long|Bool)'"
)


class DtypeHints:
    """An objective that says which types its columns have, where a layer or the loss takes others."""

    def __init__(self, objective: LossFn, columns: Sequence[str]) -> None:
        """columns: names of the features, then of the labels."""
        self._objective, self._columns = objective, columns
        self.logs = objective.logs

    def begin(self, group: Group, share: LocalBatch[torch.Tensor], here: Position) -> None:
        self._objective.begin(group, share, here)

    def __call__(self, model: torch.nn.Module, part: LocalBatch[torch.Tensor]) -> LossResult:
        try:
            return self._objective(model, part)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ElasticError | CollectiveError) or not _OF_TYPES.search(str(error)):
                raise  # a layer may speak to the other ranks
            tensors = zip(self._columns, (*part.features, *part.labels), strict=True)
            given = ", ".join(f"{name!r} as {tensor.dtype}" for name, tensor in tensors)
            raise InvalidInput(
                f"a layer of the model, or the loss, takes numbers of another type than it was given {given}: cast the "
                "column in Spark (to float, or to long for an Embedding), or the tensor in the model's forward."
            ) from error


class ModelLoss:
    """One loss of (output, *labels)."""

    logs = False

    def __init__(
        self,
        loss: Callable[..., torch.Tensor],
        weighted: bool,
        precision: str | None = None,
        labels: Sequence[str] = ("label",),
    ) -> None:
        """labels: names of their columns."""
        self._loss = RowLoss(loss, weighted, labels[0])
        self._forward = _Forward(precision, labels)

    def begin(self, group: Group, share: LocalBatch[torch.Tensor], here: Position) -> None:
        """Nothing to agree on: the denominator travels in the trailer."""

    def __call__(self, model: torch.nn.Module, part: LocalBatch[torch.Tensor]) -> LossResult:
        output = self._forward(model, part)
        summed = self._loss(output, part.labels, part.weights)
        return LossResult(summed.total, summed.denominator, _detach(output_parts(output)))


class MultiOutputLoss:
    """A model of several outputs, with a loss and a weight for each: sum over k of weight_k · mean of loss_k.

    Each mean has a denominator of its own (class weights, ignored labels), which all ranks must know before the
    backward pass adds the gradients up: one small exchange a step. `loss_LABEL` of each is logged.
    """

    logs = True

    def __init__(
        self,
        losses: Mapping[str, tuple[Callable[..., torch.Tensor], float]],
        weighted: bool,
        precision: str | None = None,
    ) -> None:
        """losses: by label column, with their weights."""
        self._names = [f"loss_{label}" for label in losses]
        self._losses = [RowLoss(loss, weighted, label, ahead=True) for label, (loss, _) in losses.items()]
        self._loss_weights = [weight for _, weight in losses.values()]
        self._forward = _Forward(precision, list(losses))
        # By which a loss's sum over rows becomes its part in the step's mean, times the rows of the step.
        self._scales: list[float] = []

    def begin(self, group: Group, share: LocalBatch[torch.Tensor], here: Position) -> None:
        own = [
            loss.denominator((label,), share.weights) if len(share) else 0.0
            for loss, label in zip(self._losses, share.labels, strict=True)
        ]
        everywhere = group.allgather(np.array(own)).sum(axis=0).tolist()
        # A loss that its user wants summed has no denominator.
        self._scales = [share.planned / (divisor or 1.0) for divisor in everywhere]

    def __call__(self, model: torch.nn.Module, part: LocalBatch[torch.Tensor]) -> LossResult:
        outputs = output_parts(self._forward(model, part))
        if len(outputs) != len(self._losses):
            raise InvalidInput(
                f"loss has {len(self._losses)} losses, but the model returned {len(outputs)}: return one output for "
                "each."
            )
        each = [
            loss(output, (label,), part.weights).total.to(torch.float64) * scale
            for loss, output, label, scale in zip(
                self._losses, outputs, part.labels, self._scales, strict=True
            )
        ]
        total = torch.stack([w * own for w, own in zip(self._loss_weights, each, strict=True)]).sum()
        logged = {name: float(own.detach()) / len(part) for name, own in zip(self._names, each, strict=True)}
        return LossResult(total, float(len(part)), _detach(outputs), logged)


class FunctionLoss:
    """The user's own function of (model, features, labels) to the rows' losses or their mean, under autocast."""

    logs = False

    def __init__(self, function: Callable[..., Any], weighted: bool, precision: str | None = None) -> None:
        self._function = function
        self._loss = RowLoss(return_loss, weighted)
        self._precision = precision

    def begin(self, group: Group, share: LocalBatch[torch.Tensor], here: Position) -> None:
        """Nothing to agree on."""

    def __call__(self, model: torch.nn.Module, part: LocalBatch[torch.Tensor]) -> LossResult:
        with autocast(self._precision):
            value = self._function(model, part.features, part.labels)
        summed = self._loss(to_float32(value), part.labels, part.weights)
        return LossResult(summed.total, summed.denominator)


class _Forward:
    """The model's output in float32 or wider, computed in `precision` where one is asked for."""

    def __init__(self, precision: str | None, labels: Sequence[str]) -> None:
        """labels: of which the outputs are, in order."""
        self._precision, self._labels = precision, list(labels)

    def __call__(self, model: torch.nn.Module, part: LocalBatch[torch.Tensor]) -> Any:
        with autocast(self._precision):
            output = model(*part.features)
        names = list(output) if isinstance(output, Mapping) else self._labels
        if set(names) == set(self._labels) and names != self._labels:
            raise InvalidInput(
                f"the model returns {', '.join(names)}, and label_cols names {', '.join(self._labels)}: name the "
                "labels in the order of the outputs."
            )
        return output if self._precision is None else to_float32(output)


def autocast(precision: str | None) -> AbstractContextManager[Any]:
    return nullcontext() if precision is None else torch.autocast("cpu", dtype=DTYPES[precision])


def return_loss(value: Any, *labels: torch.Tensor) -> Any:
    """The user's function has computed the loss already."""
    return value


def to_float32(output: Any) -> Any:
    """The same, in whatever structure, with no float of 16 bits."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    return tree_map_only(torch.Tensor, wide, output)


def _detach(outputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(output.detach() for output in outputs if isinstance(output, torch.Tensor))
