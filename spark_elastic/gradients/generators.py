"""The random generators of a process, Python's, numpy's and torch's: their state, and blocks that borrow them.

Forward passes draw from random streams of their own, so that the process's generators stay equal on all ranks. Training
thread only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.stack_sampler import gc_paused


def get_generators() -> tuple[Any, ...]:
    """Return the states of all generators; they pickle."""
    give_back_generators()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_generators(states: tuple[Any, ...]) -> None:
    give_back_generators()
    python, numpy, torch_cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch_cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def get_torch_rng_state() -> torch.Tensor:
    """`torch.get_rng_state`, which wraps a tensor with the generator's lock held."""
    with gc_paused:
        return torch.get_rng_state()


def seeded_rng(*key: int) -> AbstractContextManager[object]:
    """Inside, random numbers depend on `key` alone; afterwards the generators are as they were before."""
    return _BorrowedGenerators(key)


def get_device_rng_state() -> torch.Tensor | None:
    """The state of the generator of the device that this process trains on; None: that is the CPU."""
    module = _find_device_module()
    state: torch.Tensor | None = None if module is None else module.get_rng_state()
    return state


def set_device_rng_state(state: torch.Tensor | None) -> None:
    module = _find_device_module()
    if module is not None and state is not None:
        module.set_rng_state(state)


def _find_device_module() -> Any:
    """torch's module of the worker's device, or of a GPU that the program has begun to use; None: that is the CPU, or a
    GPU that this torch cannot use, or that this process cannot, since a DataLoader has forked it."""
    kind = get_process_context().device
    if torch.utils.data.get_worker_info() is not None or (kind == "cuda" and not torch.cuda.is_available()):
        return None
    if kind == "cpu":
        return torch.cuda if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return getattr(torch, kind)


def borrow_rng() -> AbstractContextManager[Callable[..., None]]:
    """Gives a function that seeds the generators by whole numbers; afterwards they are as they were before."""
    return _BorrowedGenerators(())


class _BorrowedGenerators:
    """The context of `borrow_rng` and `seeded_rng`; each step enters one, so it is no generator function."""

    def __init__(self, key: tuple[int, ...]) -> None:
        """key: seeds the generators at the beginning; (): nothing does."""
        self._key = key

    def __enter__(self) -> Callable[..., None]:
        self._save()
        if self._key:
            self._seed(*self._key)
        return self._seed

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _save(self) -> None:
        give_back_generators()
        self._torch, self._python = get_torch_rng_state(), random.getstate()
        self._module = _find_device_module()
        self._device = None if self._module is None else self._module.get_rng_state()
        # Since numpy 1.24 the generator is exchanged for another one: getting and setting its state takes ten times as
        # long. A block inside of another one finds it in use.
        numpy = mtrand.get_bit_generator() if hasattr(mtrand, "set_bit_generator") else None
        self._exchanges = numpy is not None and numpy is not _get_spare_generator()
        self._numpy: Any = numpy if self._exchanges else np.random.get_state()
        if self._exchanges:
            mtrand.set_bit_generator(_get_spare_generator())

    def _restore(self) -> None:
        (mtrand.set_bit_generator if self._exchanges else np.random.set_state)(self._numpy)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._module is not None:
            self._module.set_rng_state(self._device)

    def _seed(self, *key: int) -> None:
        numbers = b"%d," * len(key) % key  # formatting a member of an enum takes ten times as long
        seed = int.from_bytes(hashlib.sha256(numbers).digest()[:8], "little")
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            self._module.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


class StepGenerators(_BorrowedGenerators):
    """As `seeded_rng` for one step after another, of a training in which nothing else draws between two steps: the
    generators stay as the steps leave them until `give_back_generators`, since saving and restoring them takes as long
    as a small layer. Each step seeds them, also those that the step before did not draw from: what a step draws depends
    on its key alone, in whichever process it runs."""

    def __init__(self) -> None:
        super().__init__(())
        self.keeps = False  # whether nothing else draws between two steps

    def __call__(self, *key: int) -> StepGenerators:
        self._key = key
        return self

    def __enter__(self) -> Callable[..., None]:
        if _lent == [self] and self._module is _find_device_module():
            _lent.clear()  # until the block ends, nothing gives them back
        else:
            self._save()
        self._seed(*self._key)
        return self._seed

    def __exit__(self, *error: object) -> None:
        if self.keeps:
            _lent.append(self)
        else:
            self._restore()


_lent: list[StepGenerators] = []  # who has the generators of this process between two steps


def give_back_generators() -> None:
    """Have the generators be as they were before the steps of a training."""
    while _lent:
        _lent.pop()._restore()


@cache
def _get_spare_generator() -> np.random.MT19937:
    """One for the process: a new one costs as much as setting a state."""
    return np.random.MT19937(0)
