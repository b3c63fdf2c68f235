"""Running statistics of a model (BatchNorm's and their like), averaged over the ranks by rows, so that replicas agree.

Floating point buffers become the row-weighted mean, integer and boolean ones the maximum; buffers that nobody wrote to
(masks, tables of positions) keep their bits. They travel after the gradients and before the trailer; nothing is
written back before the step is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.torch.train.snapshot import ForwardSnapshot


class BufferExchange:
    """Buffers of one model: `send` in the exchange, `apply` in the apply section."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def send(self, group: Group, before: ForwardSnapshot, rows: int, planned: int) -> None:
        """before: the forward pass. rows: of this rank's share, out of `planned`; a rank without rows adds nothing."""
        named = [(name, b) for name, b in self._model.named_buffers() if not b.is_complex()]
        self._floats = [b for _, b in named if b.is_floating_point()]
        self._integers = [b for _, b in named if not b.is_floating_point()]
        written = [before.wrote(name, b) for name, b in named if b.is_floating_point()]
        # Zeros, not values times zero, which are NaN where a mask holds infinities.
        self._mean = _flat(self._floats, torch.float64)
        self._mean = self._mean * (rows / planned) if rows else np.zeros_like(self._mean)
        # An allreduce of nothing would still wait for the other ranks.
        if len(self._mean):
            group.allreduce(self._mean)
        self._most = np.concatenate([_flat(self._integers, torch.int64), np.array(written, np.int64)])
        if len(self._most):
            group.allreduce(self._most, op="max")

    def apply(self) -> None:
        first_flag = len(self._most) - len(self._floats)
        _write(self._floats, self._mean, self._most[first_flag:].tolist())
        _write(self._integers, self._most, [1] * len(self._integers))


def _flat(buffers: list[torch.Tensor], dtype: torch.dtype) -> npt.NDArray[Any]:
    parts = [buffer.detach().reshape(-1).to(dtype) for buffer in buffers]
    return torch.cat(parts).numpy() if parts else torch.empty(0, dtype=dtype).numpy()


def _write(buffers: list[torch.Tensor], flat: npt.NDArray[Any], flags: Sequence[int]) -> None:
    end = 0
    with torch.no_grad():
        for buffer, written in zip(buffers, flags, strict=True):
            if written:
                buffer.copy_(torch.from_numpy(flat[end : end + buffer.numel()]).view(buffer.shape))
            end += buffer.numel()
