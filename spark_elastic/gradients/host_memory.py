"""What collectives take of tensors: their memory on the host as numpy arrays, and torch.distributed's reductions.

A contiguous tensor on the CPU is its own array. Any other goes through a host copy, which for CUDA is pinned memory:
GPUs of one host exchange through the host as well. Collectives that only move data take any dtype, reductions the
engine's. Any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elastic_collectives import Group
from elastic_collectives.operands import DTYPES, Array
from spark_elastic.errors import InvalidInput

log = logging.getLogger(__name__)


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name that numpy and the engine use: float32, bfloat16, bool ..."""
    return str(dtype).removeprefix("torch.")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is contiguous on the CPU, else a copy that is."""
    dense = _detach(tensor)
    return dense if dense.device.type == "cpu" and dense.is_contiguous() else copy_to_host(dense)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    dense = _detach(tensor)
    on_gpu = dense.device.type == "cuda"
    if on_gpu:
        warn_about_gpus()
    return torch.empty(dense.shape, dtype=dense.dtype, pin_memory=on_gpu).copy_(dense)


def _detach(tensor: object) -> torch.Tensor:
    """Raises InvalidInput if it is no tensor, has no values, or is sparse."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"this takes tensors; got a {type(tensor).__name__}: use torch.as_tensor(...).")
    if tensor.device.type == "meta":
        raise InvalidInput("this collective got a tensor on meta, which has no values: give it some first.")
    if tensor.layout is not torch.strided:
        raise InvalidInput(
            f"this collective takes dense tensors and got {tensor.layout}: only all_reduce and sparse_allreduce_async "
            "take sparse ones."
        )
    return tensor.detach()


@cache
def warn_about_gpus() -> None:
    """Warn once per process that tensors on GPUs are exchanged through the host."""
    log.warning(
        "tensors of GPUs are exchanged through the host, also among GPUs of one host; gradients only until NCCL's "
        "communicator is there, if each worker has a GPU of its own."
    )


@cache
def _find_numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """An unsigned integer of the same size stands for a dtype that numpy lacks."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")


class _Memory:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # which keeps the memory
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": _find_numpy_dtype(tensor.dtype).str,
            "data": (tensor.data_ptr(), False),
        }


def view_memory(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor on the CPU; dtypes that numpy lacks as unsigned integers. `Tensor.numpy`
    would do nearly the same, but a storage that it has shown to numpy cannot be resized any more, as
    FullyShardedDataParallel does with its own."""
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), _find_numpy_dtype(tensor.dtype))
    return np.asarray(_Memory(tensor))


def array_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor on the CPU, as its numbers; bfloat16 as uint16. Raises InvalidInput if
    neither numpy nor the engine knows the dtype."""
    array = view_memory(tensor.resolve_conj().resolve_neg())
    if tensor.dtype is not torch.bfloat16 and array.dtype.name != get_dtype_name(tensor.dtype):
        raise InvalidInput(
            f"tensors of {tensor.dtype} cannot be exchanged: convert them to torch.float32 first."
        )
    return array


def tensor_of(array: Array, like: torch.Tensor) -> torch.Tensor:
    """Return the memory of an array as a tensor with the dtype and the device of `like`; a copy if that is a GPU."""
    is_bfloat16 = like.dtype is torch.bfloat16
    tensor = torch.from_numpy(array.view("int16") if is_bfloat16 else array)
    return (tensor.view(torch.bfloat16) if is_bfloat16 else tensor).to(like.device)


def copy_back(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if result.data_ptr() != tensor.data_ptr() or result.device != tensor.device:
        with torch.no_grad():
            tensor.copy_(result)
    return tensor


# torch's name of a reduction -> the engine's.
ENGINE_OPS = {"SUM": "sum", "PREMUL_SUM": "sum", "AVG": "average"}
ENGINE_OPS |= {"PRODUCT": "product", "MIN": "min", "MAX": "max"}
# Those that the engine lacks: numpy reduces what all ranks gathered.
BITWISE_OPS = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


class Operand:
    """The elements of a tensor in one dimension: its own memory where the layout allows, else a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = _detach(tensor)
        self.is_complex = tensor.is_complex()  # the elements are pairs of real and imaginary parts
        dense = self._tensor.resolve_conj().resolve_neg()
        if dense.is_complex():
            dense = torch.view_as_real(dense)
        self.flat = dense.cpu().contiguous().view(-1)  # waits for the device that computes the tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def array(self) -> Array:
        """The elements, as collectives take them; bfloat16 as uint16."""
        return view_memory(self.flat)

    def rows(self, count: int) -> Array:
        return self.array.reshape(count, -1) if self.flat.numel() else np.empty((count, 0), self.array.dtype)

    def copy(self) -> Operand:
        return Operand(self.flat.clone())

    def write_back(self) -> None:
        """Copy the elements to the tensor, unless they are its own memory."""
        if self._tensor.device.type != "cpu" or self.flat.data_ptr() != self._tensor.data_ptr():
            target = torch.view_as_real(self._tensor) if self._tensor.is_complex() else self._tensor
            # An inference tensor, too, may be changed in inference mode.
            with torch.inference_mode():
                target.copy_(self.flat.view(target.shape))


@dataclass(frozen=True)
class TorchReduction:
    name: str  # torch's, such as "SUM"
    factor: float | torch.Tensor = 1.0  # on each rank's operand (PREMUL_SUM); a tensor broadcasts

    @classmethod
    def of(cls, op: Any) -> TorchReduction:
        """op: a `ReduceOp`, one of its constants, or None for a sum."""
        if op is None:
            return cls("SUM")
        # A ReduceOp object equals its constant, but has another hash.
        state: Any = op.__getstate__() if isinstance(op, dist.ReduceOp) else (op, None)
        kind, factor = state
        return cls(kind.name, 1.0 if factor is None else factor)

    def check(self, operand: Operand) -> None:
        """Raises InvalidInput if numbers of that dtype cannot be reduced so."""
        dtype = get_dtype_name(operand.dtype)
        if self.name not in ENGINE_OPS and self.name not in BITWISE_OPS:
            raise InvalidInput(
                f"the backend 'elastic' does not know ReduceOp.{self.name}: use SUM, AVG, MIN or MAX."
            )
        if dtype not in DTYPES:
            raise InvalidInput(
                f"tensors of {operand.dtype} cannot be reduced: convert them to torch.float32 first."
            )
        if operand.is_complex and self.name not in ("SUM", "AVG", "PREMUL_SUM"):
            raise InvalidInput(
                f"ReduceOp.{self.name} takes no complex numbers: use SUM or AVG, or gather the tensors."
            )
        if self.name in BITWISE_OPS and operand.dtype.is_floating_point:
            raise InvalidInput(f"ReduceOp.{self.name} takes integers and bool; got {operand.dtype}.")
        if dtype == "bool" and self.name in ("AVG", "PREMUL_SUM"):
            raise InvalidInput(
                f"ReduceOp.{self.name} takes no bool: convert the tensor to torch.float32 first."
            )

    def allreduce(self, group: Group, operands: Sequence[Operand]) -> None:
        if self.name in BITWISE_OPS:
            for operand in operands:
                BITWISE_OPS[self.name].reduce(group.allgather(operand.array), axis=0, out=operand.array)
            return
        self._multiply(operands)
        by_dtype: dict[str, list[Array]] = {}  # the engine sums arrays of one dtype together
        for operand in operands:
            by_dtype.setdefault(get_dtype_name(operand.dtype), []).append(operand.array)
        for dtype, arrays in by_dtype.items():
            group.grouped_allreduce(arrays, ENGINE_OPS[self.name], dtype=dtype, scale=self._scale)

    def reducescatter(self, group: Group, operand: Operand, out: Operand) -> None:
        """Reduce equal parts of the operand, one for each rank; `out` receives this rank's."""
        if self.name in BITWISE_OPS:
            whole = operand.copy()
            self.allreduce(group, [whole])
            out.array[...] = whole.rows(group.size)[group.rank]
            return
        if isinstance(self.factor, torch.Tensor):
            operand = operand.copy()
            self._multiply([operand])
        rows, dtype = operand.array.reshape(group.size, -1), get_dtype_name(operand.dtype)
        result = out.array.reshape(1, -1)
        group.reducescatter(rows, ENGINE_OPS[self.name], dtype=dtype, scale=self._scale, out=result)

    @property
    def _scale(self) -> tuple[float, float]:
        return (1.0, 1.0) if isinstance(self.factor, torch.Tensor) else (float(self.factor), 1.0)

    def _multiply(self, operands: Sequence[Operand]) -> None:
        if isinstance(self.factor, torch.Tensor):
            for operand in operands:
                operand.flat.mul_(self.factor.to("cpu", operand.dtype))


def concatenate(tensors: Sequence[torch.Tensor]) -> tuple[Operand, list[int]]:
    """The elements of all tensors in a row, and how many each of them has."""
    parts = [Operand(tensor).flat for tensor in tensors]
    whole = Operand(torch.cat(parts))
    whole.is_complex = any(tensor.is_complex() for tensor in tensors)
    return whole, [part.numel() for part in parts]
