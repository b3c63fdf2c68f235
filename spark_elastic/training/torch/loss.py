"""The loss of one part of a rank's rows: the forms of the user's loss, each with the model's forward pass.

Over all ranks and parts, sum(sums) / sum(denominators) is the loss that one process would have computed for the whole
batch (R8, weighting). A loss is a module, or a function of (output, label, ...) that returns one number per row or
their plain mean; functions of torch that divide by something else are recognized. Main thread only.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import CTCLoss, _Loss
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from elastic_collectives import Group
from spark_elastic.data.transformation import list_output_parts
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import CPU, read_later
from spark_elastic.protocol.types import Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.worker.context import get_process_context

Batch = LocalBatch[Tensor]
Labels = tuple[Tensor, ...]  # one of (n, ...) for each label column

# ---- sums of losses

# The mean that such a function returns does not show what it was divided by; the module shows it.
_MODULES: dict[Callable[..., Tensor], type[_Loss]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
# These compare number by number: one label per row can only belong to an output of one column.
_ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
)  # fmt: skip


class LossResult(NamedTuple):
    """The loss of one part of a step's rows, with the numbers that metrics are computed from."""

    total: Tensor  # () with a graph: the sum over the rows
    # This part's summand of the divisor. 0 in every part: the user wants the loss summed, not averaged; NaN: the model
    # reports no loss.
    denominator: float
    outputs: tuple[Tensor, ...] = ()  # one for each label or one for all; (): unknown
    # Other numbers by name: the sum over these rows, a tensor () where a device computes it, and what the mean divides
    # it by: their number or their weight.
    logged: Mapping[str, tuple[float | Tensor, float]] = MappingProxyType({})


def find_loss_module(loss: Any) -> Any:
    """The loss module for a function of torch or a `partial` of it. Raises InvalidInput: an argument does not fit."""
    module = _find_loss_class(loss)
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
    """Whether it is a loss of torch that compares number by number, whatever its settings."""
    return (_find_loss_class(loss) or type(loss)) in _ELEMENTWISE


def _find_loss_class(loss: Any) -> type[_Loss] | None:
    """The module class of one of torch's functions, or of a `partial` of it; None for any other loss."""
    function = loss.func if isinstance(loss, functools.partial) and not loss.args else loss
    return _MODULES.get(function) if isinstance(function, FunctionType) else None


def refuse_broadcast(name: str, output: Any, labels: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Let a user's function of (output, *labels) make no matrix of an output (n, 1) and a label (n,), or the other way
    round: the mean over it would be another number. name: of the function, for the error."""
    outputs = [each for each in list_output_parts(output) if isinstance(each, Tensor)]
    if any(_are_column_and_row(one, label) for one in outputs for label in labels):
        return _BroadcastGuard(name, outputs, labels)
    return nullcontext()


def _are_column_and_row(one: Tensor, other: Tensor) -> bool:
    rows = len(other) if other.ndim else 0
    return rows > 1 and {one.shape, other.shape} == {(rows,), (rows, 1)}


class _BroadcastGuard(TorchFunctionMode):
    """What is made of outputs, or of labels, alone is allowed: a metric may compare all pairs of rows."""

    def __init__(self, name: str, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
        super().__init__()
        self._name = name
        self._outputs = {id(each): each for each in outputs}  # what was made of each alone
        self._labels = {id(each): each for each in labels}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in given if id(each) in self._outputs]
        labels = [each for each in given if id(each) in self._labels]
        pairs = [pair for pair in product(outputs, labels) if _are_column_and_row(*pair)]
        is_loss = bool(pairs) and is_elementwise(func)  # of which no matrix is seen, but its mean
        result = None if is_loss else func(*args, **(kwargs or {}))
        for output, label in pairs:
            matrix = len(label), len(label)
            if is_loss or getattr(result, "shape", None) == matrix:
                raise InvalidInput(
                    f"{self._name} made {matrix} out of the model's output {tuple(output.shape)} and labels "
                    f"{tuple(label.shape)}: give output and label the same shape."
                )
        if isinstance(result, Tensor) and bool(outputs) != bool(labels):
            (self._outputs if outputs else self._labels)[id(result)] = result
        return result


class LabelConverter:
    """Converts labels to what a loss of torch takes, given as a module or function; any other gets them unchanged. A
    loss that compares number by number also takes labels (n,) for an output (n, 1), as Horovod's estimator and Keras
    do, and labels of any type. A loss of classes also takes their numbers as floats, as Spark's StringIndexer returns
    them, and those of a sequence's tokens, (n, t), for an output (n, C, t)."""

    def __init__(self, loss: Any, label: str = "label", ahead: bool = False) -> None:
        """label: the first label's column, for errors. ahead: labels are also converted before the output exists."""
        self._kind, self._label, self._ahead = _find_loss_class(loss) or type(loss), label, ahead
        self.of_classes = issubclass(self._kind, nn.CrossEntropyLoss | nn.NLLLoss)
        self.elementwise = is_elementwise(loss)

    def convert_classes(self, labels: Labels, output: Any = None) -> Labels:
        """Numbers of classes as int64; probabilities, with as many dimensions as the output, stay as they are.
        Raises InvalidInput: a class is not a whole number."""
        if not self.of_classes:
            return labels
        label = labels[0]
        if issubclass(self._kind, nn.CrossEntropyLoss) and label.is_floating_point() and label.ndim > 1:
            if not isinstance(output, Tensor) or output.ndim == label.ndim:
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
                f"column {self._label!r} has {wrong:g}, and {self._kind.__name__} takes whole numbers of "
                "classes: number the classes from 0, or give arrays of shares of each class."
            )
        return whole, *labels[1:]

    def match_output(self, output: Any, labels: Labels) -> tuple[Tensor, ...]:
        """Give the first label the output's type and number of dimensions, where they are compared by number."""
        if not self.elementwise or not isinstance(output, Tensor):
            return labels
        label = labels[0] if labels[0].dtype is output.dtype else labels[0].to(output.dtype)
        if output.ndim == 2 and label.ndim == 1 and output.shape == (len(label), 1):
            label = label.unsqueeze(1)
        return label, *labels[1:]


class RowLoss:
    """Computes a `LossResult` with a copy of the user's loss, which is never changed."""

    def __init__(
        self, loss: Callable[..., Tensor], weighted: bool = False, label: str = "label", ahead: bool = False
    ) -> None:
        """weighted: rows have sample weights. label, ahead: as of `LabelConverter`."""
        loss = find_loss_module(loss)
        keywords = loss.keywords if isinstance(loss, functools.partial) else {}
        reduction = getattr(loss, "reduction", keywords.get("reduction"))
        self._weighted, self._converter = weighted, LabelConverter(loss, label, ahead)
        self.is_summed = reduction == "sum"  # whether the user wants the loss summed, not averaged
        self._per_row_sums = reduction in ("sum", "batchmean")
        self._loss = loss
        # On the CPU, computes the sum over rows at once where each has one number; None: only `_loss` is known to.
        self._sum_loss: Any = None
        # CTC's mean divides every row by the length of its own label, which its "none" does not.
        if isinstance(loss, _Loss) and not isinstance(loss, CTCLoss):
            self._loss = copy.deepcopy(loss)
            self._loss.reduction = "none"
        if type(loss) in (*_ELEMENTWISE, nn.CrossEntropyLoss, nn.NLLLoss):  # a class of the user may do more
            self._sum_loss = copy.deepcopy(loss)
            self._sum_loss.reduction = "sum"
        self._class_weights: Tensor | None = None  # (C,) Weights of the classes, on the host
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None:
            self._class_weights = loss.weight.detach().to(CPU, torch.float64)
        self._device = CPU
        self._is_unchecked = not isinstance(loss, nn.Module)  # until it has seen two rows or more

    def __call__(
        self,
        output: Tensor,
        labels: Labels,
        weights: Tensor | None,
        on_host: tuple[tuple[Tensor, ...], Tensor | None] | None = None,
    ) -> LossResult:
        """Compute the loss of these rows. on_host: labels and weights in memory of the host, where the others are on a
        device, for denominators that do not wait for it. Raises InvalidInput: the loss does not fit them."""
        rows = labels[0].shape[0]  # `len` takes a call of Python
        host_labels, host_weights = on_host or (labels, weights)
        host_labels = self._converter.convert_classes(host_labels, output)
        labels = (labels[0].to(host_labels[0].dtype), *labels[1:]) if on_host else host_labels
        if isinstance(self._loss, nn.Module) and labels[0].device != self._device:
            self._device = labels[0].device
            self._loss.to(self._device)
        matched = self._converter.match_output(output, labels)
        may_sum = self._sum_loss is not None and weights is None and labels[0].device == CPU
        if may_sum and self._has_one_number_per_row(output, matched):
            total = self._sum_loss(output, *matched)
            return LossResult(total, self._compute_denominator(host_labels, host_weights))
        value = self._compute_value(output, matched)
        self._check_value(value, output, labels)
        if value.ndim == 0:
            if self._weighted:
                raise InvalidInput(
                    "sample_weight_col needs a loss of one number per row: use a torch loss module, or return a "
                    "tensor of one loss per row instead of their mean."
                )
            return LossResult(value, 0.0) if self.is_summed else LossResult(value * rows, float(rows))
        per_row = self._reduce_rows(value, labels[0], rows)
        if weights is not None:
            per_row = per_row * weights
        return LossResult(per_row.sum(), self._compute_denominator(host_labels, host_weights))

    def _compute_value(self, output: Any, labels: Labels) -> Any:
        if not self._is_unchecked or len(labels[0]) < 2:
            return self._loss(output, *labels)
        self._is_unchecked = False
        with refuse_broadcast("the loss", output, labels):
            return self._loss(output, *labels)

    def compute_denominator(self, labels: Labels, weights: Tensor | None) -> float:
        """The denominator that `__call__` returns, without the model's output. Both are on the host."""
        return self._compute_denominator(self._converter.convert_classes(labels), weights)

    def _compute_denominator(self, labels: Labels, weights: Tensor | None) -> float:
        if self.is_summed:
            return 0.0
        if weights is None and not self._divides_by_class(labels[0]):
            return float(labels[0].shape[0])
        divisors = torch.ones(len(labels[0]), dtype=torch.float64)
        if self._divides_by_class(labels[0]):
            divisors = self._find_class_divisors(labels[0]).reshape(len(divisors), -1).sum(1)
        return float((divisors if weights is None else divisors * weights).sum())

    def _has_one_number_per_row(self, output: Any, labels: Labels) -> bool:
        label = labels[0]
        if not isinstance(output, Tensor) or len(labels) > 1:
            return False
        if self._converter.elementwise:
            return output.shape == label.shape and output.numel() == label.shape[0]
        return self._converter.of_classes and output.ndim == 2 and label.ndim == 1

    def _check_value(self, value: Any, output: Any, labels: Labels) -> None:
        rows = len(labels[0])
        if not isinstance(value, Tensor):
            raise InvalidInput(
                f"the loss returned {type(value).__name__}: return a tensor, of one loss per row or their mean."
            )
        if not value.ndim:
            return
        if len(value) != rows:
            raise InvalidInput(
                f"the loss returned {len(value)} numbers for {rows} rows: return one per row, or their mean."
            )
        outputs = [part for part in list_output_parts(output) if isinstance(part, Tensor)]
        most = sum(part.numel() for part in outputs)
        if not isinstance(self._loss, _Loss):
            most = max(most, *(label.numel() for label in labels))
        if value.numel() > max(most, rows):
            shapes = " and ".join(str(tuple(part.shape)) for part in outputs)
            raise InvalidInput(
                f"the loss made {tuple(value.shape)} out of the model's output {shapes} and labels "
                f"{tuple(labels[0].shape)}: give output and label the same shape."
            )

    def _reduce_rows(self, value: Tensor, label: Tensor, rows: int) -> Tensor:
        if value.ndim == 1:
            return value
        flat = value.reshape(rows, -1)
        return flat.sum(1) if self._per_row_sums or self._divides_by_class(label) else flat.mean(1)

    def _divides_by_class(self, label: Tensor) -> bool:
        return self._converter.of_classes and not label.is_floating_point()

    def _find_class_divisors(self, label: Tensor) -> Tensor:
        """The divisors of torch's mean: the class weight of each label, 0 for ignored labels."""
        loss = self._loss
        assert isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        counted = label != loss.ignore_index
        weights = self._class_weights
        if weights is None:
            return counted.to(torch.float64)
        return torch.where(counted, weights[torch.where(counted, label, 0)], 0.0)


# ---- losses with the model's forward pass

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = frozenset(DTYPES.values())


class LossFn(ABC):
    """Called for each micro-batch of a step, after `begin`, which every rank calls."""

    logs = False  # whether `LossResult.logged` is used

    def begin(  # noqa: B027 - most exchange nothing: the step summary carries the denominator
        self, group: Group, batch: Batch, position: Position
    ) -> None:
        """A step begins. Collective."""

    @abstractmethod
    def __call__(self, model: nn.Module, part: Batch) -> LossResult: ...


class ModelLoss(LossFn):
    def __init__(
        self,
        loss: Callable[..., Tensor],
        weighted: bool,
        precision: str | None = None,
        labels: Sequence[str] = ("label",),
    ) -> None:
        self._loss = RowLoss(loss, weighted, labels[0])
        self._forward = _Forward(precision, labels)

    def __call__(self, model: nn.Module, part: Batch) -> LossResult:
        output = self._forward(model, part)
        total, denominator, *_ = self._loss(output, part.labels, part.weights, part.on_host)
        return LossResult(
            total, denominator, (output,) if isinstance(output, Tensor) else _list_tensors(output)
        )


class MultiOutputLoss(LossFn):
    """A model of several outputs with a loss and a weight for each: the sum over k of weight_k · mean of loss_k. Each
    mean has a denominator of its own (class weights, ignored labels), which all ranks must know before the backward
    pass adds the gradients up: one small exchange a step. `loss_LABEL` of each is logged."""

    logs = True

    def __init__(
        self,
        losses: Mapping[str, tuple[Callable[..., Tensor], float]],
        weighted: bool,
        precision: str | None = None,
    ) -> None:
        """losses: by label column, with their weights."""
        self._names = [f"loss_{label}" for label in losses]
        self._losses = [RowLoss(loss, weighted, label, ahead=True) for label, (loss, _) in losses.items()]
        self._loss_weights = [weight for _, weight in losses.values()]
        self._forward = _Forward(precision, list(losses))
        self._scales = [1.0] * len(losses)  # rows of the step / divisor, for each loss

    def begin(self, group: Group, batch: Batch, position: Position) -> None:
        own = np.array([self._compute_denominators(part) for part in batch.shares or (batch,)])
        # One after the other, so that the sums over virtual shares do not depend on how ranks divide them.
        whole = np.concatenate(group.allgatherv(own)) if batch.shares else group.allgather(own[0])
        everywhere = whole.sum(axis=0).tolist()
        self._scales = [batch.planned / (divisor or 1.0) for divisor in everywhere]  # 0: it is summed

    def __call__(self, model: nn.Module, part: Batch) -> LossResult:
        outputs = list_output_parts(self._forward(model, part))
        if len(outputs) != len(self._losses):
            raise InvalidInput(
                f"loss has {len(self._losses)} losses, but the model returned {len(outputs)}: return one output for "
                "each."
            )
        host_labels, host_weights = part.on_host or (part.labels, part.weights)
        given = zip(self._losses, outputs, part.labels, host_labels, strict=True)
        sums = [loss(out, (y,), part.weights, ((host,), host_weights)) for loss, out, y, host in given]
        each = [own.total.to(torch.float64) * scale for own, scale in zip(sums, self._scales, strict=True)]
        total = torch.stack([w * own for w, own in zip(self._loss_weights, each, strict=True)]).sum()
        logged = {}
        for name, loss, own, scaled in zip(self._names, self._losses, sums, each, strict=True):
            value, divisor = (scaled, float(len(part))) if loss.is_summed else (own.total, own.denominator)
            logged[name] = read_later(value.detach()), divisor
        return LossResult(total, float(len(part)), _list_tensors(outputs), logged)

    def _compute_denominators(self, part: Batch) -> list[float]:
        labels, weights = part.on_host or (part.labels, part.weights)
        pairs = zip(self._losses, labels, strict=True)
        return [loss.compute_denominator((y,), weights) if len(part) else 0.0 for loss, y in pairs]


class FunctionLoss(LossFn):
    """The user's own function of (model, features, labels) to the rows' losses or their mean, under autocast."""

    def __init__(self, function: Callable[..., Any], weighted: bool, precision: str | None = None) -> None:
        self._function = function
        self._loss = RowLoss(return_loss, weighted)
        self._precision = precision

    def __call__(self, model: nn.Module, part: Batch) -> LossResult:
        with autocast(self._precision):
            value = self._function(model, part.features, part.labels)
        return self._loss(to_float32(value), part.labels, part.weights, part.on_host)


class _Forward:
    """Computes the model's output, under autocast if a precision is set. Losses get it in float32 or wider."""

    def __init__(self, precision: str | None, labels: Sequence[str]) -> None:
        self._precision, self._labels = precision, list(labels)

    def __call__(self, model: nn.Module, part: Batch) -> Any:
        if self._precision is None:
            output = model(*part.features)
        else:
            with autocast(self._precision):
                output = model(*part.features)
        if isinstance(output, Tensor):
            return output.float() if output.dtype in HALVES else output
        if output is None:
            raise InvalidInput("the model returned None: end its forward with a return of its output.")
        names = list(output) if isinstance(output, Mapping) else self._labels
        if set(names) == set(self._labels) and names != self._labels:
            raise InvalidInput(
                f"the model returns {', '.join(names)}, and label_cols names {', '.join(self._labels)}: name the "
                "labels in the order of the outputs."
            )
        return to_float32(output)


def autocast(precision: str | None) -> AbstractContextManager[Any]:
    """precision: "bf16", "fp16", or None: no autocast."""
    if precision is None:
        return nullcontext()
    return torch.autocast(get_process_context().device, dtype=DTYPES[precision])


def return_loss(value: Any, *labels: Tensor) -> Any:
    return value


def to_float32(output: Any) -> Any:
    """A copy of a structure of tensors with floats of 16 bits as float32."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in HALVES else tensor

    return tree_map_only(Tensor, wide, output)


def _list_tensors(output: Any) -> tuple[Tensor, ...]:
    return tuple(part for part in list_output_parts(output) if isinstance(part, Tensor))
