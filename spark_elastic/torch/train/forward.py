"""What a forward pass changes besides gradients: module buffers and random generators.

An aborted step puts buffers back (R3, aborted forward). A step that is applied averages the buffers that it wrote over
the ranks. Main thread only.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from elastic_collectives import Group
from spark_elastic.ops.flat_allreduce import FlatBuffer
from spark_elastic.torch.devices import CPU
from spark_elastic.torch.generators import get_device_rng_state, get_torch_rng_state, set_device_rng_state
from spark_elastic.torch.layers import SyncBatchNorm
from spark_elastic.torch.tensors import get_dtype_name
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
    return any(module._buffers for module in modules)


class BufferSnapshot:
    """The buffers of a model at the beginning of a step."""

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
        self._model = model
        named = dict(model.named_buffers()) if has_buffers(modules) else {}
        # By name: the buffer, and what it held.
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
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

    def restore(self) -> None:
        with torch.no_grad():
            for name, (buffer, saved) in self._buffers.items():
                owner, _, own_name = name.rpartition(".")
                # A forward pass may have put a new tensor in its place.
                self._model.get_submodule(owner)._buffers[own_name] = buffer
                buffer.copy_(saved)


class BufferExchange:
    """Averages the buffers that a step wrote, so that replicas agree: `exchange` in the exchange, `apply` in the apply
    section.

    Floating point buffers become the mean over ranks weighted by rows, integer and boolean ones the maximum. Buffers
    that no rank wrote to (masks, tables of positions, which may be larger than the gradients) do not travel.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def exchange(self, group: Group, before: BufferSnapshot, rows: int, planned: int) -> None:
        """Exchange the buffers; collective.

        Args:
            before: the buffers before the forward pass.
            rows: of this rank; a rank without rows adds nothing.
            planned: rows of the step over all ranks.
        """
        named = [(name, b) for name, b in self._model.named_buffers() if not b.is_complex()]
        changed = np.array(before.find_changed(named), np.int64)
        if len(changed):
            group.allreduce(changed, op="max")  # all ranks then send the same buffers
        sent = [b for (_, b), flag in zip(named, changed, strict=True) if flag]
        self._floats = [b for b in sent if b.is_floating_point()]
        self._integers = [b for b in sent if not b.is_floating_point()]
        # Zeros, not values times zero, which are NaN where a mask holds infinities.
        self._means = _copy_to_flat(self._floats, torch.float64, rows / planned if rows else None)
        self._means.allreduce(group)
        self._maxima = _copy_to_flat(self._integers, torch.int64)
        self._maxima.allreduce(group, "max")

    def apply(self) -> None:
        with torch.no_grad():
            for buffers, flat in ((self._floats, self._means), (self._integers, self._maxima)):
                arrays = [torch.from_numpy(view) for view in flat.views]
                if buffers and buffers[0].device != CPU:  # all of them in one copy
                    whole = torch.cat([array.reshape(-1) for array in arrays]).to(buffers[0].device)
                    parts = torch.split(whole, [buffer.numel() for buffer in buffers])
                    arrays = [part.view(b.shape) for part, b in zip(parts, buffers, strict=True)]
                for buffer, array in zip(buffers, arrays, strict=True):
                    buffer.copy_(array)


def _copy_to_flat(buffers: list[torch.Tensor], dtype: torch.dtype, factor: float | None = 1.0) -> FlatBuffer:
    """Copy buffers, times `factor`, to one flat buffer; None stands for zeros."""
    arrays: list[Any] = [None] * len(buffers)
    if factor is not None and buffers:
        tensors: Sequence[torch.Tensor] = [buffer.detach().to(dtype) for buffer in buffers]
        if buffers[0].device != CPU:  # all of them in one copy
            whole = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            tensors = torch.split(whole, [buffer.numel() for buffer in buffers])
        arrays = [tensor.view(b.shape).numpy() for tensor, b in zip(tensors, buffers, strict=True)]
    name = get_dtype_name(dtype)
    flat = FlatBuffer([tuple(buffer.shape) for buffer in buffers], [name] * len(buffers))
    flat.fill([array if array is None or factor == 1.0 else array * factor for array in arrays])
    return flat


def describe_world_dependence(model: torch.nn.Module) -> str | None:
    """A sentence on the layers that make a step depend on how its rows are split over workers (R9, scope of P2).

    None: the weights equal those of any other world, up to rounding.
    """
    return describe_dependent_layers((name or "the model", why) for name, why in _dependent_layers(model))


def shares_statistics(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether the ranks exchange statistics inside of forward passes, so that each must make exactly one, of all its
    rows."""
    return any(isinstance(module, SyncBatchNorm) and module.training for module in modules)


def _dependent_layers(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm | SyncBatchNorm):
            yield name, f"{type(module).__name__}: statistics of each worker's own rows"
        elif _is_random(module):
            yield name, f"{type(module).__name__}: random in each worker"


def depends_on_batch(module: torch.nn.Module) -> bool:
    """Whether a layer of torch draws random numbers, or takes statistics of all rows, while it is in training mode."""
    return isinstance(module, _BatchNorm) or _is_random(module)


def _is_random(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.RReLU):
        return True
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float | int) and rate > 0.0  # RNNs and attention hold a number, others a module
