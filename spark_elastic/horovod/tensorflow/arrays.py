"""Tensors as the numpy arrays that operations take, memory for their results, and calls of Python from graphs.

TensorFlow takes over an array that a graph's call returns without a copy if it begins at a multiple of 64 bytes.
`Memory` hands out such arrays, and reuses one only after TensorFlow has released it. TensorFlow wraps what a call
raises in an error of its own, so the call remembers the error and the thread that runs the graph raises it; messages
are never parsed. The training thread traces; TensorFlow's threads run the calls.
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

from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.flat_allreduce import FlatBuffer, allocate_aligned
from spark_elastic.worker.context import get_group_context, get_process_context

REUSED_FROM = 1 << 20  # bytes; smaller pieces are cheaper to allocate anew
Bytes: TypeAlias = npt.NDArray[np.uint8]
Tensor: TypeAlias = Any  # a tf.Tensor, eager or of a graph
Tensors: TypeAlias = Sequence[Tensor]


def for_tensor(array: Array, dtype: Any) -> Array:
    """Return the same memory with the numpy dtype that TensorFlow uses for `dtype`."""
    kind = np.dtype(dtype.as_numpy_dtype)
    return array if array.dtype == kind else array.view(kind)


def view_of(tensor: Tensor) -> Array:
    """Return the memory of an eager tensor, which must not be written to, or a copy if it cannot be shared."""
    if tensor.dtype == tf.bfloat16 or not tensor.device.endswith("CPU:0"):
        return np.asarray(tensor.numpy())
    return np.asarray(memoryview(tensor))


class _Lease:
    """The owner of a piece of memory: freed with the last array that is cut from it. It is no array itself, since views
    of numpy skip the arrays between them and the owner of the memory."""

    def __init__(self, whole: Bytes) -> None:
        self.__array_interface__ = whole.__array_interface__
        self.whole = whole


class Memory:
    """Reusable pieces of aligned memory. Without a lock, since pieces come back whenever the collector runs."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}  # by size in bytes

    def piece(self, nbytes: int) -> Bytes:
        """Return that many bytes with any content: zeros on first use."""
        if nbytes < REUSED_FROM:
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


@dataclass
class _Remembered:
    error: BaseException | None = None  # since the newest graph began; None: there was none


def _get_remembered() -> _Remembered:
    """Return the record of the current world: an error of an earlier world is no cause in the next one."""
    return get_group_context().get_or_create(_Remembered)


def _raise_remembered(call_flat: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call_flat)
    def call(function: Any, *args: Any) -> Any:
        if not tf.executing_eagerly():  # the graph becomes part of another one
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


# Every graph that runs eagerly passes here: of a tf.function, `model.fit`, a ConcreteFunction, or a tape's gradient.
# TensorFlow has no hook to raise another error.
AtomicFunction.call_flat = _raise_remembered(AtomicFunction.call_flat)


Body: TypeAlias = Callable[[list[Array]], Sequence[Array]]
F = TypeVar("F", bound=Callable[..., Any])
LAST = "_spark_elastic_last"  # attribute of a graph: its newest call


def no_autograph(function: F) -> F:
    """Keep autograph, which rewrites what a tf.function calls, from rewriting this function and what it calls."""
    unconverted: F = tf.autograph.experimental.do_not_convert(function)
    return unconverted


@no_autograph
def append_to_graph(build: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Build operations that run after those of the call before in this graph, and before those of the next one."""
    graph = tf.compat.v1.get_default_graph()
    former = getattr(graph, LAST, None)
    with tf.control_dependencies([] if former is None else [former]):
        results = build()
    setattr(graph, LAST, results[0].op)
    return results


@no_autograph
def call(body: Body, tensors: Tensors, dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[Tensor]:
    """Run `body` now in eager mode, or as one `tf.numpy_function` of the graph. Calls of one graph run in the order in
    which they were traced, so that unnamed operations match.

    Args:
        body: must neither write into its arrays nor return them, since TensorFlow may write into results.
        dtypes, shapes: of the results; the shapes are static ones.

    Raises:
        InvalidInput: operations do not take a tensor's dtype, or XLA compiles the graph.
    """
    for dtype in (tensor.dtype for tensor in tensors):
        if not (dtype.is_floating or dtype.is_integer or dtype.is_bool) or dtype.is_quantized:
            raise InvalidInput(f"tensors of {dtype.name} cannot be exchanged: convert them to numbers first.")
    if tf.executing_eagerly():
        arrays = map(for_tensor, body([view_of(tensor) for tensor in tensors]), dtypes)
        return [tf.convert_to_tensor(array) for array in arrays]
    graph = tf.compat.v1.get_default_graph()
    if GraphOrParentsInXlaContext(graph):
        raise InvalidInput(
            "XLA cannot compile an exchange between workers: pass jit_compile=False to model.compile() or tf.function."
        )
    run = _remember_errors(body, dtypes)
    results = append_to_graph(lambda: tf.numpy_function(run, list(tensors), list(dtypes)))
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def _remember_errors(body: Body, dtypes: Sequence[Any]) -> Callable[..., list[Array]]:
    def run(*arrays: Array) -> list[Array]:
        try:
            results = body(list(arrays))
        except BaseException as error:
            remembered = _get_remembered()
            remembered.error = remembered.error or error  # the first one is the cause of the others
            raise
        return list(map(for_tensor, results, dtypes))

    return no_autograph(run)
