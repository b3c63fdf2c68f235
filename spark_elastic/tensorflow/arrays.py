"""Tensors as the numpy arrays that operations take, and memory for their results.

TensorFlow takes over an array that a graph's call returns without copying it where it begins at a multiple of 64 bytes.
`Memory` gives such arrays out, and uses one again only once TensorFlow has let go of it. Any thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.flat_allreduce import FlatBuffer, allocate_aligned
from spark_elastic.worker.context import get_group_context, get_process_context

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
            return allocate_aligned(nbytes)
        free = self._free.setdefault(nbytes, [])
        try:
            whole = free.pop()
        except IndexError:
            whole = allocate_aligned(nbytes)
        lease = _Lease(whole)
        weakref.finalize(lease, free.append, whole).atexit = False
        return np.asarray(lease)


def copy_arrays(arrays: Sequence[Array]) -> FlatBuffer:
    """Return a buffer that holds copies of the arrays, each in memory that TensorFlow takes over without a copy."""
    memory = get_process_context().get_or_create(Memory)
    buffer = FlatBuffer([array.shape for array in arrays], [array.dtype for array in arrays], memory.piece)
    buffer.fill(arrays)
    return buffer


# What a collective raised inside of a TensorFlow graph, which knows it as an error of its own kind only.
#
# A graph's call remembers what it raised, and whatever runs the graph raises that. No message is ever looked at.
# Written by TensorFlow's threads, read by the training thread.


@dataclass
class _Remembered:
    error: BaseException | None = None


def remember(error: BaseException) -> None:
    """The first one of a world is the cause of the others."""
    remembered = _get_remembered()
    if remembered.error is None:
        remembered.error = error


def _get_remembered() -> _Remembered:
    """The error remembered in the current world: what an earlier world raised is no cause in the next."""
    return get_group_context().get_or_create(_Remembered)


def _raise_remembered(call_flat: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call_flat)
    def call(function: Any, *args: Any) -> Any:
        if not tf.executing_eagerly():  # it becomes part of another graph
            return call_flat(function, *args)
        _get_remembered().error = None
        try:
            return call_flat(function, *args)
        except tf.errors.OpError as error:
            remembered = _get_remembered()
            cause, remembered.error = remembered.error, None
            if cause is None:
                raise
            raise cause from error

    return call


# Every graph that runs eagerly comes by here, whoever asked for it: a tf.function, `model.fit`, a ConcreteFunction, a
# tape's gradient. TensorFlow offers no place of its own to raise another error.
AtomicFunction.call_flat = _raise_remembered(AtomicFunction.call_flat)


# Python that runs where tensors are: at once in eager mode, as one `tf.numpy_function` inside of a graph.
#
# Calls of one graph run in the order in which they were traced, so that unnamed operations pair up. What one raises is
# remembered for whoever runs the graph (`failures`). Traced by the training thread, run by TensorFlow's threads.


Body: TypeAlias = Callable[[list[Array]], Sequence[Array]]
F = TypeVar("F", bound=Callable[..., Any])
LAST = "_spark_elastic_last"  # on a graph: its newest call


def no_autograph(function: F) -> F:
    """Autograph, which rewrites what a tf.function calls, leaves it and what it calls as they are."""
    left: F = tf.autograph.experimental.do_not_convert(function)
    return left


@no_autograph
def call(body: Body, tensors: Sequence[Tensor], dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[Tensor]:
    """The results of `body`, of these dtypes and static shapes. It must neither write into the arrays that it
    is given nor return them: TensorFlow may write into what it gets.

    Raises:
        InvalidInput: it is being compiled by XLA.
    """
    if tf.executing_eagerly():
        results = body([view_of(tensor) for tensor in tensors])
        return [
            tf.convert_to_tensor(for_tensor(array, dtype))
            for array, dtype in zip(results, dtypes, strict=True)
        ]
    graph = tf.compat.v1.get_default_graph()
    if GraphOrParentsInXlaContext(graph):
        raise InvalidInput(
            "XLA cannot compile an exchange between workers: pass jit_compile=False to model.compile() or tf.function."
        )
    former = getattr(graph, LAST, None)
    with tf.control_dependencies([] if former is None else [former]):
        made = tf.numpy_function(_remember_errors(body, dtypes), list(tensors), list(dtypes))
    setattr(graph, LAST, made[0].op)
    for result, shape in zip(made, shapes, strict=True):
        result.set_shape(shape)
    return list(made)


def _remember_errors(body: Body, dtypes: Sequence[Any]) -> Callable[..., list[Array]]:
    def guarded(*arrays: Array) -> list[Array]:
        try:
            results = body(list(arrays))
        except BaseException as error:
            remember(error)
            raise
        return [for_tensor(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]

    return no_autograph(guarded)
