"""Tensors as the numpy arrays that operations take, and memory for their results.

TensorFlow takes over an array that a graph's call returns without copying it where it begins at a multiple of 64 bytes.
`Memory` gives such arrays out, and uses one again only once TensorFlow has let go of it. Any thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import floor_of_process

ALIGN = 64
KEPT_FROM = 1 << 20  # bytes; smaller pieces are cheaper to allocate anew
Bytes: TypeAlias = npt.NDArray[np.uint8]
Tensor: TypeAlias = Any  # a tf.Tensor, eager or of a graph


def name_of(dtype: Any) -> str:
    """As numpy and the engine call it: float32, bfloat16, bool ...

    Raises:
        InvalidInput: operations do not take it.
    """
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool) or dtype.is_quantized:
        raise InvalidInput(f"tensors of {dtype.name} cannot be exchanged: convert them to numbers first.")
    return str(dtype.name)


def for_tensor(array: Array, dtype: Any) -> Array:
    """The same memory, as TensorFlow knows `dtype`."""
    kind = np.dtype(dtype.as_numpy_dtype)
    return array if array.dtype == kind else array.view(kind)


def view_of(tensor: Tensor) -> Array:
    """The memory of an eager tensor, not to be written to; a copy where it cannot be had."""
    if tensor.dtype == tf.bfloat16 or not tensor.device.endswith("CPU:0"):
        return np.asarray(tensor.numpy())
    return np.asarray(memoryview(tensor))


class _Lease:
    """What is cut from an array of it keeps it alive; it ends with the last of these arrays.

    No array itself: numpy's views skip arrays between them and the owner of the memory.
    """

    def __init__(self, whole: Bytes) -> None:
        self.__array_interface__ = whole.__array_interface__
        self.whole = whole


class Memory:
    """Pieces of aligned memory. Without a lock: pieces come back whenever the collector runs."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}

    def piece(self, nbytes: int) -> Bytes:
        """So many bytes, of any content; zeros when they are given out for the first time."""
        if nbytes < KEPT_FROM:
            return _aligned(nbytes)
        free = self._free.setdefault(nbytes, [])
        try:
            whole = free.pop()
        except IndexError:
            whole = _aligned(nbytes)
        lease = _Lease(whole)
        weakref.finalize(lease, free.append, whole).atexit = False
        return np.asarray(lease)


def copies(arrays: Sequence[Array]) -> tuple[list[Array], Bytes]:
    """(copies of them, the one piece of memory that they lie in, each aligned)"""
    ends = [0]
    for array in arrays:
        ends.append(ends[-1] + -(-array.nbytes // ALIGN) * ALIGN)
    memory = floor_of_process().shared("tensorflow memory", Memory).piece(ends[-1])
    made = []
    for begin, array in zip(ends[:-1], arrays, strict=True):
        copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        made.append(copy)
    return made, memory


def _aligned(nbytes: int) -> Bytes:
    whole = np.zeros(nbytes + ALIGN, np.uint8)
    begin = -whole.ctypes.data % ALIGN
    return whole[begin : begin + nbytes]
