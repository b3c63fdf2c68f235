"""What a forward pass changes besides gradients, kept so that an aborted step can be taken again (R3).

Module buffers (running statistics), and the random generators of torch, numpy and Python.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The state of this process's CPU generators."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


class ForwardSnapshot:
    """Taken at the begin of a step; `restore` puts everything back."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        self._rng = rng_state()

    def wrote(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether a buffer's values changed since; torch's version counters miss what BatchNorm writes."""
        return name not in self._buffers or not torch.equal(self._buffers[name][1], buffer)

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, kept in self._buffers.values():
                buffer.copy_(kept)
        set_rng_state(self._rng)
