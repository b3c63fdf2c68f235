"""Results that do not depend on who computes a row: `RowDropout`, and what `determinism="bitwise"` asks.

torch's kernels give the same bits for the same shapes if number of threads, processor and alignment of memory are the
same. Training thread only.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from spark_elastic.data.plan import draw_uniform
from spark_elastic.errors import InvalidInput


class RowDropout(torch.nn.Module):
    """As torch.nn.Dropout over inputs of shape (rows, ...), drawn from the numbers of the rows (R9, scope of P2). The
    estimators call `draw_rows` before each forward pass; a hand-written loop must call it itself."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise InvalidInput(f"RowDropout takes a probability within 0 and 1, without 1; got {p}.")
        self.p = p
        self._words: tuple[int, ...] = ()
        self._rows: npt.NDArray[np.int64] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self._rows is None or len(self._rows) != len(x):
            count = "none" if self._rows is None else str(len(self._rows))
            raise InvalidInput(
                f"RowDropout got {len(x)} rows, draw_rows() was called for {count}: call it before each forward pass."
            )
        numbers = draw_uniform(self._rows, math.prod(x.shape[1:]), *self._words).reshape(x.shape)
        return x * torch.from_numpy((numbers >= self.p) / (1.0 - self.p)).to(x)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def draw_rows(model: torch.nn.Module, rows: npt.NDArray[np.int64], *words: int) -> None:
    """Set what the RowDropouts of a model draw from in the next forward pass. Two layers draw differently.
    rows: (n,) row numbers. words: such as seed, epoch and step."""
    for number, module in enumerate(m for m in model.modules() if isinstance(m, RowDropout)):
        module._words, module._rows = (*words, number), rows


def exchanges_statistics(module: torch.nn.Module) -> bool:
    """Whether a layer exchanges statistics with the other ranks in each forward pass, as `SyncBatchNorm` does."""
    return bool(getattr(module, "exchanges_statistics", False))


ALIGN = 64  # bytes: what torch's own allocator aligns to


def use_deterministic_arithmetic() -> None:
    """One thread for each operation, and an error for operations that have no deterministic kernel."""
    torch.set_num_threads(1)  # sums are divided by the number of threads
    os.environ.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | dict(os.environ))  # what cuBLAS needs for it
    torch.set_deterministic_debug_mode("error")
    if (
        "torch._inductor.config" in sys.modules
    ):  # else this imports the compiler, which takes seconds, to tell it so
        torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a pass over memory
    torch.backends.cudnn.benchmark = False  # it chooses kernels by their times


@cache
def describe_arithmetic() -> str:
    """What the bits of this process's results depend on besides the numbers; equal where they are equal."""
    parts = [f"torch {torch.__version__}", torch.backends.cpu.get_cpu_capability(), _find_processor()]
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        parts += [torch.cuda.get_device_name(), f"cuDNN {cudnn}"]
    return ", ".join(parts)


def _find_processor() -> str:
    """The model of the processor, by which libraries choose kernels and sizes of blocks."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def align_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors that begin elsewhere to an address that is a multiple of ALIGN, in place."""
    with torch.no_grad():
        for tensor in tensors:
            if not is_aligned(tensor):
                tensor.data = tensor.detach().clone()


def align_batch(batch: Any) -> Any:
    """A structure of tensors with those that begin elsewhere copied."""
    return tree_map_only(torch.Tensor, lambda each: each if is_aligned(each) else each.clone(), batch)


def is_aligned(tensor: torch.Tensor) -> bool:
    is_there = (
        tensor.device.type == "cpu" and tensor.layout is torch.strided
    )  # on a device it may arrive still
    return not is_there or tensor.data_ptr() % ALIGN == 0


def check_layers(model: torch.nn.Module, *, keeps_buffers: bool) -> None:
    """Raises InvalidInput: results of a layer depend on how rows are divided over workers, even by whole shares.
    keeps_buffers: buffers that the shares' forward passes write are brought together after each step."""
    why = (
        "computes statistics of all workers' rows: use torch.nn.BatchNorm1d, 2d or 3d, which takes those of a virtual "
        "share."
        if keeps_buffers
        else "keeps statistics of the rows that its own worker has seen: use GroupNorm or LayerNorm, or set "
        "track_running_stats=False."
    )
    for name, layer in model.named_modules():
        synced = isinstance(layer, torch.nn.SyncBatchNorm) or exchanges_statistics(layer)
        tracks = isinstance(layer, _NormBase) and layer.track_running_stats
        if (layer.training or not model.training) and (synced or (tracks and not keeps_buffers)):
            kind = type(layer).__name__
            raise InvalidInput(f"determinism='bitwise' cannot train layer {name!r}, {kind}, which {why}")
