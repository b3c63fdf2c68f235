"""Running statistics of a model (BatchNorm's and their like), averaged over the ranks by rows, so that replicas agree.

Floating point buffers become the row-weighted mean, integer and boolean ones the maximum; buffers that nobody wrote to
(masks, tables of positions, which may be larger than the gradients) stay where they are. The others travel after the
gradients and before the trailer; nothing is written back before the step is applied.
"""

from __future__ import annotations

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
        written = np.array([before.wrote(name, b) for name, b in named], np.int64)
        _all_reduced(group, written, "max")  # all ranks send the same ones
        sent = [b for (_, b), flag in zip(named, written, strict=True) if flag]
        self._floats = [b for b in sent if b.is_floating_point()]
        self._integers = [b for b in sent if not b.is_floating_point()]
        self._mean = _flat(self._floats, torch.float64)
        # Zeros, not values times zero, which are NaN where a mask holds infinities.
        self._mean = self._mean * (rows / planned) if rows else np.zeros_like(self._mean)
        _all_reduced(group, self._mean, "sum")
        self._most = _flat(self._integers, torch.int64)
        _all_reduced(group, self._most, "max")

    def apply(self) -> None:
        _write(self._floats, self._mean)
        _write(self._integers, self._most)


def _all_reduced(group: Group, array: npt.NDArray[Any], op: str) -> None:
    if len(array):  # an allreduce of nothing would still wait for the other ranks
        group.allreduce(array, op=op)


def _flat(buffers: list[torch.Tensor], dtype: torch.dtype) -> npt.NDArray[Any]:
    parts = [buffer.detach().reshape(-1).to(dtype) for buffer in buffers]
    return torch.cat(parts).numpy() if parts else torch.empty(0, dtype=dtype).numpy()


def _write(buffers: list[torch.Tensor], flat: npt.NDArray[Any]) -> None:
    end = 0
    with torch.no_grad():
        for buffer in buffers:
            buffer.copy_(torch.from_numpy(flat[end : end + buffer.numel()]).view(buffer.shape))
            end += buffer.numel()
