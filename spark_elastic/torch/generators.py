"""The state of a process's global random generators: Python's, numpy's and torch's. Training thread only."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_generators() -> tuple[Any, ...]:
    """Return the states of all generators; they pickle."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_generators(states: tuple[Any, ...]) -> None:
    """Set all generators to what `get_generators` returned."""
    python, numpy, torch_cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch_cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
