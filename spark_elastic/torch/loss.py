"""Sums of per-row losses, and what to divide them by, so that any split of a batch gives the same gradient (R8).

A loss is a torch loss module, or a function of (output, label, ...) that returns one number per row or their mean.
Each call gives (sum, denominator): over all ranks and micro-batches, sum(sums) / sum(denominators) is the loss that one
process would have computed for the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.modules.loss import CTCLoss, _Loss

from spark_elastic.errors import InvalidInput


@dataclass(frozen=True)
class LossSum:
    """total: 0-dim tensor with a graph. denominator: this part's share of the divisor; 0 in every part of a loss that
    the user wants summed, not averaged."""

    total: torch.Tensor
    denominator: float


class RowLoss:
    """Wraps the user's loss, which is never changed. weighted: rows carry sample weights."""

    def __init__(self, loss: Callable[..., torch.Tensor], weighted: bool = False) -> None:
        self._weighted = weighted
        self._summed = getattr(loss, "reduction", None) == "sum"
        self._loss = loss
        # CTC's mean divides every row by its own length; "batchmean" and the like are no plain means either.
        known = isinstance(loss, _Loss) and not isinstance(loss, CTCLoss)
        if known and getattr(loss, "reduction", None) in ("mean", "sum", "none"):
            self._loss = copy.deepcopy(loss)
            self._loss.reduction = "none"  # type: ignore[attr-defined]

    def __call__(
        self, output: torch.Tensor, labels: tuple[torch.Tensor, ...], weights: torch.Tensor | None
    ) -> LossSum:
        """labels: one tensor per label column, (n, ...). weights: (n,) or None.

        Raises:
            InvalidInput: sample weights are given, and the loss returns no number per row.
        """
        rows = len(labels[0])
        value = self._loss(output, *labels)
        if value.ndim == 0:
            if self._weighted:
                raise InvalidInput(
                    "sample_weight_col needs a loss of one number per row: use a torch loss module, or return a "
                    "tensor of one loss per row instead of their mean."
                )
            return LossSum(value * rows, float(rows))
        per_row, divisors = self._by_row(value, labels, rows)
        if weights is not None:
            per_row, divisors = per_row * weights, divisors * weights
        if self._summed:
            return LossSum(per_row.sum(), 0.0)
        return LossSum(per_row.sum(), float(divisors.sum()))

    def _by_row(
        self, value: torch.Tensor, labels: tuple[torch.Tensor, ...], rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n,) losses and (n,) divisors."""
        if (
            isinstance(self._loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss)
            and not labels[0].is_floating_point()
        ):
            return value.reshape(rows, -1).sum(1), self._class_divisors(self._loss, labels[0]).reshape(
                rows, -1
            ).sum(1)
        flat = value.reshape(rows, -1)
        per_row = flat.sum(1) if self._summed else flat.mean(1)
        return per_row, torch.ones(rows, dtype=torch.float64)

    def _class_divisors(
        self, loss: torch.nn.CrossEntropyLoss | torch.nn.NLLLoss, label: torch.Tensor
    ) -> torch.Tensor:
        """What torch divides by in its mean: the class weights of the labels, nothing for ignored ones."""
        counted = label != loss.ignore_index
        if loss.weight is None:
            return counted.to(torch.float64)
        weights = loss.weight.to(torch.float64)
        return torch.where(counted, weights[label.clamp(min=0)], 0.0)
