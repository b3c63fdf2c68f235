"""What a forward pass changes besides gradients: module buffers and random generators.

An aborted step puts buffers back (R3, aborted forward); what an applied step wrote is brought together in `buffers`.
Main thread only.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from spark_elastic.gradients.devices import CPU
from spark_elastic.gradients.generators import get_device_rng_state, get_torch_rng_state, set_device_rng_state
from spark_elastic.training.torch.module_state import PLAIN, list_buffers, put_buffer
from spark_elastic.training.torch.row_dropout import exchanges_statistics
from spark_elastic.training.trainer import describe_dependent_layers


def rng_state() -> dict[str, Any]:
    """The state of this process's generators, as tensors and plain values."""
    state: Any = np.random.get_state()
    kind, words, *rest = state
    return {
        "torch": get_torch_rng_state(),
        "numpy": (kind, words.tolist(), *rest),
        "python": random.getstate(),
        "device": get_device_rng_state(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.array(words, np.uint32), *rest))
    random.setstate(state["python"])
    set_device_rng_state(state["device"])


def has_buffers(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether any of them has a buffer of its own now; a forward pass may add some."""
    return any(map(attrgetter("_buffers"), modules))


Attributes = list[dict[str, Any]]  # by module


def copy_attributes(modules: Iterable[torch.nn.Module]) -> Attributes:
    return [dict(vars(module)) for module in modules]


def restore_attributes(modules: Iterable[torch.nn.Module], saved: Attributes) -> None:
    """Put back attributes of plain types that a forward pass has set."""
    for module, before in zip(modules, saved, strict=False):  # modules that were added come last
        now = vars(module)
        for name in [name for name, value in now.items() if type(value) in PLAIN and name not in before]:
            del now[name]
        now.update({name: value for name, value in before.items() if type(value) in PLAIN})


class BufferSnapshot:
    """What a forward pass may write to, buffers and plain attributes, as it was at the beginning of a step."""

    def __init__(
        self,
        model: torch.nn.Module,
        modules: Iterable[torch.nn.Module],
        former: BufferSnapshot | None = None,
    ) -> None:
        """
        Args:
            modules: all modules of the model; finding them takes long where there are many.
            former: of a step before, whose memory is used again.
        """
        self._model, modules = model, tuple(modules)
        self._attributes = copy_attributes(modules)
        self._unset: dict[str, bool] = {}
        self._saved: dict[str, bool] = {}
        # By name: the buffer, and what it held.
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if not has_buffers(modules):
            return
        found = list_buffers(model)
        named = {name: each.tensor for name, each in found.items() if each.tensor is not None}
        self._unset = {name: each.is_saved for name, each in found.items() if each.tensor is None}
        self._saved = {name: each.is_saved for name, each in found.items()}
        if former is not None and former._holds(named):
            self._buffers = former._buffers
        with torch.no_grad():
            if self._buffers:
                torch._foreach_copy_([saved for _, saved in self._buffers.values()], list(named.values()))
            else:
                self._buffers = {name: (buffer, buffer.clone()) for name, buffer in named.items()}

    def _holds(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the very buffers that it was made of."""
        return named.keys() == self._buffers.keys() and all(
            self._buffers[name][0] is buffer and self._buffers[name][1].shape == buffer.shape
            for name, buffer in named.items()
        )

    def get(self, name: str) -> torch.Tensor | None:
        """What a buffer held; None: it was not there."""
        return self._buffers[name][1] if name in self._buffers else None

    def find_changed(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[bool]:
        """Whether each buffer's values changed since; torch's version counters miss what BatchNorm writes. Waits for
        the device once."""
        flags: list[bool] = []
        computed: dict[int, torch.Tensor] = {}  # by index: a flag () on the device
        for index, (name, buffer) in enumerate(named):
            flags.append(name not in self._buffers)
            if not flags[index]:
                before = self._buffers[name][1]
                if buffer.device == CPU or buffer.shape != before.shape:
                    flags[index] = not torch.equal(before, buffer)
                else:
                    computed[index] = (before != buffer).any()
        if computed:
            for index, flag in zip(computed, torch.stack(list(computed.values())).tolist(), strict=True):
                flags[index] = flag
        return flags

    def restore(self, model: torch.nn.Module | None = None, *, attributes: bool = True) -> None:
        """Put back what was there, where a forward pass has written, replaced, registered or removed something.

        Args:
            model: a copy of the model, which gets buffers of its own; None: the model itself.
            attributes: whether attributes are put back as well.
        """
        target = self._model if model is None else model
        with torch.no_grad():
            for name, each in list_buffers(target).items():
                if name not in self._saved:
                    delattr(each.owner, each.name)
            for name, is_saved in self._unset.items():
                put_buffer(target, name, None, is_saved=is_saved)
            for name, (buffer, saved) in self._buffers.items():
                in_place = model is None and buffer.shape == saved.shape
                put_buffer(target, name, buffer if in_place else saved.clone(), is_saved=self._saved[name])
                if in_place:
                    buffer.copy_(saved)
        if attributes:
            restore_attributes(target.modules(), self._attributes)


def describe_world_dependence(model: torch.nn.Module) -> str | None:
    """A sentence on the layers that make a step depend on how its rows are split over workers (R9, scope of P2).

    None: the weights equal those of any other world, up to rounding.
    """
    return describe_dependent_layers((name or "the model", why) for name, why in _dependent_layers(model))


def shares_statistics(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether the ranks exchange statistics inside of forward passes, so that each must make exactly one, of all its
    rows."""
    return any(exchanges_statistics(module) and module.training for module in modules)


def _dependent_layers(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if not module.training:
            continue
        synced = isinstance(module, torch.nn.SyncBatchNorm) or exchanges_statistics(module)
        if isinstance(module, _BatchNorm) and not synced:
            yield name, f"{type(module).__name__}: statistics of each worker's own rows"
        elif is_random(module):
            yield name, f"{type(module).__name__}: random in each worker"


def depends_on_batch(module: torch.nn.Module) -> bool:
    """Whether a layer of torch draws random numbers, or takes statistics of all rows, while it is in training mode."""
    return isinstance(module, _BatchNorm) or is_random(module)


def is_random(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.RReLU):
        return True
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float | int) and rate > 0.0  # RNNs and attention hold a number, others a module
