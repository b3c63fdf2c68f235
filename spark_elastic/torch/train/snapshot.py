"""What a forward pass changes besides gradients, kept so that an aborted step can be taken again (R3).

Module buffers (running statistics) are put back on abort. The random generators of torch, numpy and Python are put
back always: forward passes draw from streams of their own, so that the generators' states stay equal on all ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from spark_elastic.worker.stack_sampler import gc_paused


def rng_state() -> dict[str, Any]:
    """The state of this process's CPU generators."""
    return {"torch": _torch_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def _torch_state() -> torch.Tensor:
    """`torch.get_rng_state`, which wraps a tensor with the generator's lock held."""
    with gc_paused:
        return torch.get_rng_state()


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


@contextmanager
def seeded_rng(*key: int) -> Iterator[None]:
    """Inside, random numbers follow from `key` alone; after it, the generators go on as if nothing had been drawn."""
    kept = _torch_state(), mtrand.get_bit_generator(), random.getstate()
    numbers = b"%d," * len(key) % key  # to spell a member of an enum takes ten times as long
    seed = int.from_bytes(hashlib.sha256(numbers).digest()[:8], "little")
    torch.default_generator.manual_seed(seed)
    # Another generator in its place for a while: numpy takes ten times as long to say and to take on a state.
    mtrand.set_bit_generator(_spare())
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        mtrand.set_bit_generator(kept[1])
        random.setstate(kept[2])


@cache
def _spare() -> np.random.MT19937:
    """For all drawings of the process: a new one costs as much as a state."""
    return np.random.MT19937(0)


def has_buffers(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether any of them has one of its own now; a forward pass may add some."""
    return any(module._buffers for module in modules)


class ForwardSnapshot:
    """The buffers at the begin of a step; `restore` puts them back."""

    def __init__(self, model: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> None:
        """modules: all of the model's, which it takes long to find where there are many."""
        self._model = model
        named = model.named_buffers() if has_buffers(modules) else ()
        self._buffers = {name: (buffer, buffer.clone()) for name, buffer in named}

    def has_changed(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether a buffer's values changed since; torch's version counters miss what BatchNorm writes."""
        return name not in self._buffers or not torch.equal(self._buffers[name][1], buffer)

    def restore(self) -> None:
        with torch.no_grad():
            for name, (buffer, kept) in self._buffers.items():
                owner, _, own_name = name.rpartition(".")
                # A forward pass may have put a new tensor in its place.
                self._model.get_submodule(owner)._buffers[own_name] = buffer
                buffer.copy_(kept)
