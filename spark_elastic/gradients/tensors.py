"""Tensors as the numpy arrays that collectives take.

A contiguous tensor on the CPU is its own array. Any other goes through a host copy, which for CUDA is pinned memory:
GPUs of one host exchange through the host as well. Training thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import get_process_context

log = logging.getLogger(__name__)


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name that numpy and the engine use: float32, bfloat16, bool ..."""
    return str(dtype).removeprefix("torch.")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is contiguous on the CPU, else a copy that is."""
    _check(tensor)
    dense = tensor.detach()
    return dense if dense.device.type == "cpu" and dense.is_contiguous() else copy_to_host(tensor)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU."""
    _check(tensor)
    if tensor.layout is not torch.strided:
        raise InvalidInput(f"this takes dense tensors; got {tensor.layout}: see sparse_allreduce_async.")
    dense = tensor.detach()
    on_gpu = dense.device.type == "cuda"
    if on_gpu:
        warn_about_gpus()
    return torch.empty(dense.shape, dtype=dense.dtype, pin_memory=on_gpu).copy_(dense)


def _check(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"this takes tensors; got a {type(tensor).__name__}: use torch.as_tensor(...).")


class _GpuWarning:
    """Logged when it is created, which a process does once."""

    def __init__(self) -> None:
        log.warning(
            "tensors of GPUs are exchanged through the host, also among GPUs of one host; gradients only until NCCL's "
            "communicator is there, if each worker has a GPU of its own."
        )


def warn_about_gpus() -> None:
    """Warn once per process that tensors on GPUs are exchanged through the host."""
    get_process_context().get_or_create(_GpuWarning)


# An integer of the same size stands for a dtype that numpy lacks.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def _find_numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    empty = torch.empty(0, dtype=dtype)
    try:
        return empty.numpy().dtype
    except TypeError:
        return empty.view(_SAME_SIZE[empty.element_size()]).numpy().dtype


class _Memory:
    """The memory of a tensor, for numpy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # which keeps the memory
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": _find_numpy_dtype(tensor.dtype).str,
            "data": (tensor.data_ptr(), False),
        }


def view_memory(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor on the CPU; dtypes that numpy lacks as integers of their size.

    `Tensor.numpy` would do nearly the same, but a storage that it has shown to numpy cannot be resized any more, as
    FullyShardedDataParallel does with its own.
    """
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), _find_numpy_dtype(tensor.dtype))
    return np.asarray(_Memory(tensor))


def array_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor on the CPU; bfloat16 as uint16."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("uint16")
    try:
        found: Array = tensor.resolve_conj().resolve_neg().numpy()
    except TypeError as error:
        raise InvalidInput(f"tensors of {tensor.dtype} cannot be exchanged: {error}.") from error
    return found


def tensor_of(array: Array, like: torch.Tensor) -> torch.Tensor:
    """Return the memory of an array as a tensor with the dtype and the device of `like`; a copy if that is a GPU."""
    if like.dtype is torch.bfloat16:
        tensor = torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(like.device)


def copy_back(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy `result` into `tensor`, unless it is the same memory."""
    if result.data_ptr() != tensor.data_ptr() or result.device != tensor.device:
        with torch.no_grad():
            tensor.copy_(result)
    return tensor


F = TypeVar("F", bound=Callable[..., Any])


def disable_compile(function: F) -> F:
    """As `torch.compiler.disable`, for code with sockets and threads: a compiled caller calls it between two graphs.

    The compiler is imported at the first call, since the import takes seconds.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call_disabled(*arguments: Any, **named: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    return cast("F", call_disabled)
