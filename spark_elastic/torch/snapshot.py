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
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._rng = rng_state()

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        set_rng_state(self._rng)
