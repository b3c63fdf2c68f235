"""How gradients are made and applied in 16-bit arithmetic: scaled for fp16, as they are otherwise.

A step whose gradients overflowed is not applied. All ranks come to the same decision, since they look at the same sums.
Main thread only.
"""

from __future__ import annotations

from typing import Any

import torch


class Scaling:
    """A `GradScaler` around the exchange where `precision` is fp16; else nothing. Its scale is part of the state."""

    def __init__(self, precision: str | None = None) -> None:
        self._scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        self.skipped = 0  # steps that were not applied since training began

    def backward(self, total: torch.Tensor, divisor: int) -> None:
        """Of total / divisor."""
        if self._scaler.is_enabled():
            self._scaler.scale(total / divisor).backward()  # type: ignore[no-untyped-call]
        else:  # what the division would hand on, without its place in the graph
            total.backward(total.new_full((), 1.0 / divisor))  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Once the gradients are summed over all ranks."""
        if self._scaler.is_enabled():
            self._scaler.scale(torch.zeros(()))  # a rank without rows has made no scale yet
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._scaler.is_enabled():
            optimizer.step()
            return
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        if self._scaler.get_scale() < before:
            self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": self._scaler.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
