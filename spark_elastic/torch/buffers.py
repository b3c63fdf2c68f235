"""Running statistics of a model (BatchNorm's and their like), averaged over the ranks by rows, so that replicas agree.

Float buffers become the row-weighted mean, integer ones the maximum. They travel after the gradients and before the
trailer; nothing is written back before the step is applied.
"""

from __future__ import annotations

import numpy as np
import torch

from elastic_collectives import Group


class BufferExchange:
    """The buffers of one model. `send` during the exchange, `apply` in the apply section."""

    def __init__(self, model: torch.nn.Module) -> None:
        buffers = list(model.buffers())
        self._floats = [b for b in buffers if b.is_floating_point()]
        self._integers = [b for b in buffers if not b.is_floating_point() and b.dtype is not torch.bool]
        self._mean = np.zeros(sum(b.numel() for b in self._floats))
        self._most = np.zeros(sum(b.numel() for b in self._integers), np.int64)

    def send(self, group: Group, rows: int, planned: int) -> None:
        """rows: of this rank's share, out of `planned`; a rank without rows adds nothing."""
        if self._mean.size:
            self._mean = _flat(self._floats, np.float64) * (rows / planned)
            group.allreduce(self._mean)
        if self._most.size:
            self._most = _flat(self._integers, np.int64)
            group.allreduce(self._most, op="max")

    def apply(self) -> None:
        _write(self._floats, self._mean)
        _write(self._integers, self._most)


def _flat(buffers: list[torch.Tensor], dtype: type) -> np.ndarray:
    return np.concatenate([buffer.detach().numpy().reshape(-1).astype(dtype) for buffer in buffers])


def _write(buffers: list[torch.Tensor], flat: np.ndarray) -> None:
    end = 0
    with torch.no_grad():
        for buffer in buffers:
            part = torch.from_numpy(flat[end : end + buffer.numel()]).view(buffer.shape)
            buffer.copy_(part)
            end += buffer.numel()
