"""Which gradients an optimizer has applied: what a state asks before it commits. Training thread only."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex

import torch

from spark_elastic.errors import InvalidInput


class DistributedBase(torch.optim.Optimizer):
    """Refuses what no distributed optimizer can do. First base of the two classes of ours."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise InvalidInput("DistributedOptimizer takes no further parameters: add the group before wrapping.")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidInput(
            "a DistributedOptimizer cannot be copied or pickled, since its exchange belongs to this process: take its "
            "state_dict(), and wrap the other optimizer itself."
        )

    def has_unapplied_gradients(self) -> bool | None:
        """Whether there are gradients that its newest step has not applied; None: it does not know."""
        return None


def is_distributed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it knows which gradients its steps have applied."""
    return isinstance(optimizer, DistributedBase) and optimizer.has_unapplied_gradients() is not None


def mark_applied(optimizer: torch.optim.Optimizer) -> None:
    """Note that a step of a plain optimizer has applied the gradients that are there, as they are now, or that a
    `GradScaler` has skipped it."""
    for gradient in _list_gradients(optimizer):
        gradient._applied_version = gradient._version  # type: ignore[attr-defined]


def has_unapplied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has gradients that its newest step has not applied; a plain one if `mark_applied` was called
    after each step."""
    knows = optimizer.has_unapplied_gradients() if isinstance(optimizer, DistributedBase) else None
    if knows is not None:
        return knows
    changed = (
        gradient
        for gradient in _list_gradients(optimizer)
        if getattr(gradient, "_applied_version", None) != gradient._version
    )
    return any(_has_values(gradient) for gradient in changed)  # `zero_grad` may leave zeros


def _list_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def _has_values(gradient: torch.Tensor) -> bool:
    own: Any = gradient
    if hasattr(own, "to_local"):  # of a DTensor, whose own `any` would be a collective
        own = own.to_local()
    return bool((own._values() if own.is_sparse else own).any())
