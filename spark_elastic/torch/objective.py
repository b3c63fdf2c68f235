"""What a step minimises: model, losses and labels put together, for one part of a rank's rows.

Each form gives a sum over rows with a graph and what it is divided by (R8), so that any split of a batch gives the same
gradient. Knows no loop. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.torch.loss import RowLoss
from spark_elastic.training.share import Share

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Scored:
    """total, denominator: as `LossSum`. outputs: of the model, detached, one per label or one for all; () where only
    the loss is known. logged: other numbers of these rows by name, their means."""

    total: torch.Tensor
    denominator: float
    outputs: tuple[torch.Tensor, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict)


class Objective(Protocol):
    """Called for each part of a step's share; `begin` comes before, on every rank. logs: `Scored.logged` is in use."""

    logs: bool

    def begin(self, group: Group, share: Share[torch.Tensor]) -> None: ...

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored: ...


class ModelLoss:
    """One loss of (output, *labels)."""

    logs = False

    def __init__(
        self, loss: Callable[..., torch.Tensor], weighted: bool, precision: str | None = None
    ) -> None:
        self._loss = RowLoss(loss, weighted)
        self._forward = _Forward(precision)

    def begin(self, group: Group, share: Share[torch.Tensor]) -> None:
        """Nothing to agree on: the denominator travels in the trailer."""

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored:
        output = self._forward(model, part)
        summed = self._loss(output, part.labels, part.weights)
        outputs = output if isinstance(output, tuple | list) else (output,)
        return Scored(summed.total, summed.denominator, _detached(outputs))


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
        self._losses = [RowLoss(loss, weighted) for loss, _ in losses.values()]
        self._loss_weights = [weight for _, weight in losses.values()]
        self._forward = _Forward(precision)
        self._factors: list[float] = []

    def begin(self, group: Group, share: Share[torch.Tensor]) -> None:
        own = [
            loss.denominator((label,), share.weights) if len(share) else 0.0
            for loss, label in zip(self._losses, share.labels, strict=True)
        ]
        everywhere = group.allgather(np.array(own)).sum(axis=0).tolist()
        # A loss that its user wants summed has no denominator.
        self._factors = [
            weight * share.planned / (divisor or 1.0)
            for weight, divisor in zip(self._loss_weights, everywhere, strict=True)
        ]

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored:
        outputs = self._forward(model, part)
        if not isinstance(outputs, tuple | list) or len(outputs) != len(self._losses):
            found = len(outputs) if isinstance(outputs, tuple | list) else type(outputs).__name__
            raise InvalidInput(
                f"loss has {len(self._losses)} losses, but the model returned {found}: return one output for each."
            )
        summed = [
            loss(output, (label,), part.weights)
            for loss, output, label in zip(self._losses, outputs, part.labels, strict=True)
        ]
        total = torch.stack(
            [s.total.to(torch.float64) * f for s, f in zip(summed, self._factors, strict=True)]
        ).sum()
        logged = {
            name: float(s.total.detach()) / (s.denominator or 1.0)
            for name, s in zip(self._names, summed, strict=True)
        }
        return Scored(total, float(len(part)), _detached(outputs), logged)


class FunctionLoss:
    """The user's own function of (model, features, labels) to the rows' losses or their mean, under autocast."""

    logs = False

    def __init__(self, function: Callable[..., Any], weighted: bool, precision: str | None = None) -> None:
        self._function = function
        self._loss = RowLoss(_given, weighted)
        self._precision = precision

    def begin(self, group: Group, share: Share[torch.Tensor]) -> None:
        """Nothing to agree on."""

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored:
        with _autocast(self._precision):
            value = self._function(model, part.features, part.labels)
        summed = self._loss(_widened(value), part.labels, part.weights)
        return Scored(summed.total, summed.denominator)


class LightningLoss:
    """A LightningModule's `training_step`, and its `validation_step` in evaluation mode where it has one.

    The batch is (features, labels), each a tensor, or a tuple where there are several columns. What it logs is
    averaged over rows. The whole step runs under autocast, as Lightning has it. Duck-typed: Lightning itself is not
    imported.
    """

    logs = True

    def __init__(self, weighted: bool, precision: str | None = None) -> None:
        self._precision = precision
        self._loss = RowLoss(_given, weighted)
        self._logged: dict[str, float] = {}
        self._step = 0

    def begin(self, group: Group, share: Share[torch.Tensor]) -> None:
        self._step += 1

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Scored:
        batch = tuple(side[0] if len(side) == 1 else side for side in (part.features, part.labels))
        self._logged = {}
        # Instance attributes: the module's own would ask for a Trainer.
        vars(model).update(log=self._log, log_dict=self._log_all)
        evaluates = not model.training and _overrides(model, "validation_step")
        step: Any = model.validation_step if evaluates else model.training_step
        try:
            with _autocast(self._precision):
                value = step(batch, self._step)
        finally:
            del vars(model)["log"], vars(model)["log_dict"]
        value = value["loss"] if isinstance(value, Mapping) else value
        if value is None and evaluates:
            return Scored(torch.zeros(()), float(len(part)), logged=self._logged)
        summed = self._loss(_widened(value), part.labels, part.weights)
        return Scored(summed.total, summed.denominator, logged=self._logged)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._logged[name] = float(value)

    def _log_all(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self._log(name, value)


class _Forward:
    """The model's output in float32 or wider, computed in `precision` where one is asked for."""

    def __init__(self, precision: str | None) -> None:
        self._precision = precision

    def __call__(self, model: torch.nn.Module, part: Share[torch.Tensor]) -> Any:
        with _autocast(self._precision):
            output = model(*part.features)
        return output if self._precision is None else _widened(output)


def _autocast(precision: str | None) -> AbstractContextManager[Any]:
    return nullcontext() if precision is None else torch.autocast("cpu", dtype=DTYPES[precision])


def is_lightning(model: Any) -> bool:
    """Whether a module brings its own step and optimizer, as LightningModules do."""
    return all(callable(getattr(model, name, None)) for name in ("training_step", "configure_optimizers"))


def _overrides(model: torch.nn.Module, name: str) -> bool:
    """Lightning's own class has every hook, without content."""
    method = getattr(type(model), name, None)
    return method is not None and not str(getattr(method, "__module__", "")).startswith(
        ("lightning.", "pytorch_lightning.")
    )


def _given(value: Any, *labels: torch.Tensor) -> Any:
    """The user's function has computed the loss already."""
    return value


def _widened(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, tuple | list):
        return tuple(_widened(part) for part in output)
    return output


def _detached(outputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(output.detach() for output in outputs if isinstance(output, torch.Tensor))
