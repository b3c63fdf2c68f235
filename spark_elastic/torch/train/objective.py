"""What a step minimises: model, losses and labels put together, for one part of a rank's rows.

Each form gives a sum over rows with a graph and what it is divided by (R8), so that any split of a batch gives the same
gradient. Knows no loop. Main thread only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.protocol.types import Position
from spark_elastic.torch.train.loss import RowLoss
from spark_elastic.training.model_output import output_parts
from spark_elastic.training.share import Share

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Scored:
    """total, denominator: as `LossSum`; a denominator that is no number: there is no loss to look at. outputs: of the
    model, detached, one per label or one for all; () where only the loss is known. logged: other numbers of these rows
    by name, their means."""

    total: torch.Tensor
    denominator: float
    outputs: tuple[torch.Tensor, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict)


class Objective(Protocol):
    """Called for each part of a step's share; `begin` comes before, on every rank. logs: `Scored.logged` is in use."""

    logs: bool

    def begin(self, group: Group, share: Share[torch.Tensor], here: Position) -> None: ...

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored: ...


# Of torch's errors where a layer, or a loss, is given numbers of a type that it does not take. A tensor that any other
# error shows may have a "dtype=".
_OF_TYPES = re.compile(
    r"\b(dtype(?!=)|datatype|scalar types?|[Ii]nput type|result type)\b|not implemented for '(Long|Bool)'"
)


class TypesTold:
    """An objective that says which types its columns have, where a layer or the loss takes others."""

    def __init__(self, objective: Objective, columns: Sequence[str]) -> None:
        """columns: names of the features, then of the labels."""
        self._objective, self._columns = objective, columns
        self.logs = objective.logs

    def begin(self, group: Group, share: Share[torch.Tensor], here: Position) -> None:
        self._objective.begin(group, share, here)

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored:
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

    def begin(self, group: Group, share: Share[torch.Tensor], here: Position) -> None:
        """Nothing to agree on: the denominator travels in the trailer."""

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored:
        output = self._forward(model, part)
        summed = self._loss(output, part.labels, part.weights)
        return Scored(summed.total, summed.denominator, _detached(output_parts(output)))


class ModelLosses:
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

    def begin(self, group: Group, share: Share[torch.Tensor], here: Position) -> None:
        own = [
            loss.denominator((label,), share.weights) if len(share) else 0.0
            for loss, label in zip(self._losses, share.labels, strict=True)
        ]
        everywhere = group.allgather(np.array(own)).sum(axis=0).tolist()
        # A loss that its user wants summed has no denominator.
        self._scales = [share.planned / (divisor or 1.0) for divisor in everywhere]

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored:
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
        return Scored(total, float(len(part)), _detached(outputs), logged)


class FunctionLoss:
    """The user's own function of (model, features, labels) to the rows' losses or their mean, under autocast."""

    logs = False

    def __init__(self, function: Callable[..., Any], weighted: bool, precision: str | None = None) -> None:
        self._function = function
        self._loss = RowLoss(given_loss, weighted)
        self._precision = precision

    def begin(self, group: Group, share: Share[torch.Tensor], here: Position) -> None:
        """Nothing to agree on."""

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored:
        with autocast(self._precision):
            value = self._function(model, part.features, part.labels)
        summed = self._loss(widened(value), part.labels, part.weights)
        return Scored(summed.total, summed.denominator)


class _Forward:
    """The model's output in float32 or wider, computed in `precision` where one is asked for."""

    def __init__(self, precision: str | None, labels: Sequence[str]) -> None:
        """labels: of which the outputs are, in order."""
        self._precision, self._labels = precision, list(labels)

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Any:
        with autocast(self._precision):
            output = model(*part.features)
        names = list(output) if isinstance(output, Mapping) else self._labels
        if set(names) == set(self._labels) and names != self._labels:
            raise InvalidInput(
                f"the model returns {', '.join(names)}, and label_cols names {', '.join(self._labels)}: name the "
                "labels in the order of the outputs."
            )
        return output if self._precision is None else widened(output)


def autocast(precision: str | None) -> AbstractContextManager[Any]:
    return nullcontext() if precision is None else torch.autocast("cpu", dtype=DTYPES[precision])


def given_loss(value: Any, *labels: torch.Tensor) -> Any:
    """The user's function has computed the loss already."""
    return value


def widened(output: Any) -> Any:
    """The same, in whatever structure, with no float of 16 bits."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    return tree_map_only(torch.Tensor, wide, output)


def _detached(outputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(output.detach() for output in outputs if isinstance(output, torch.Tensor))
