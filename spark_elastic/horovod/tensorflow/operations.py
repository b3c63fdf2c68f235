"""Horovod's operations on TensorFlow's tensors, under its names, eager and in graphs. All ranks of the set must call
them.

`horovod.ops.operations` says what names, numbers and gradients are. A graph raises in the thread that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients import process_sets
from spark_elastic.gradients.process_sets import ALL, ProcessSet, is_single_process
from spark_elastic.gradients.reduction import Average, Compression, ReduceOp, ReduceOptions, Sum
from spark_elastic.horovod.ops import operations
from spark_elastic.horovod.ops.operations import (
    allgather_arrays,
    allreduce_arrays,
    compress_tensors,
    get_queue,
    reducescatter_arrays,
    submit,
)
from spark_elastic.horovod.tensorflow.arrays import Tensor, Tensors, call, copy_arrays, no_autograph
from spark_elastic.runs.handlers import unwrap_variable

T = TypeVar("T")

__all__ = ["allgather", "allgather_object", "allreduce", "alltoall", "join", "reducescatter"]
__all__ += ["grouped_allgather", "grouped_allreduce", "grouped_reducescatter"]
__all__ += ["broadcast", "broadcast_", "broadcast_global_variables", "broadcast_variables"]
__all__ += ["broadcast_object", "broadcast_object_fn"]
__all__ += ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


@no_autograph
def allreduce(  # noqa: PLR0913 - name and arguments are Horovod's
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = ALL,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Return the average (default) or another reduction of all ranks' tensors of one shape. Differentiable.
    IndexedSlices are summed or averaged by gathering them, and stay IndexedSlices. device_dense, device_sparse,
    ignore_name_scope: not used."""
    scale = prescale_factor, postscale_factor
    options = ReduceOptions.from_args(average, op, scale, process_set, compression)
    if isinstance(tensor, tf.IndexedSlices):
        return allreduce_slices(tensor, name, options)
    return allreduce_tensors([tensor], name, options)[0]


@no_autograph
def grouped_allreduce(  # noqa: PLR0913
    tensors: Tensors,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Tensor]:
    """Allreduce several tensors as one operation. Differentiable."""
    scale = prescale_factor, postscale_factor
    options = ReduceOptions.from_args(average, op, scale, process_set, compression)
    if not tensors:
        raise InvalidInput("a grouped operation takes at least one tensor.")
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return [
            allreduce(t, None, "", "", compression, options.op, *options.scale, None, process_set)
            for t in tensors
        ]
    return allreduce_tensors(tensors, name, options)


@no_autograph
def allreduce_tensors(tensors: Tensors, name: str | None, options: ReduceOptions) -> list[Tensor]:
    """Allreduce tensors as one operation. Differentiable: the gradient is reduced in the same way."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*inputs: Tensor) -> tuple[list[Tensor], Any]:
        def gradient(*upstream: Tensor) -> list[Tensor]:
            return allreduce_tensors(upstream, None, options)

        return _allreduce(inputs, name, options), gradient

    return list(differentiable(*(tf.convert_to_tensor(tensor) for tensor in tensors)))


def _allreduce(tensors: Tensors, name: str | None, options: ReduceOptions) -> list[Tensor]:
    wire, exchanged, decompress = compress_tensors(tensors, options, are_float32(tensors))

    def body(arrays: list[Array]) -> list[Array]:
        results = copy_arrays(arrays).views
        allreduce_arrays(results, name, options, wire)
        return results

    return decompress(call(body, exchanged, [t.dtype for t in exchanged], [t.shape for t in tensors]))


def are_float32(tensors: Tensors) -> bool:
    return all(tensor.dtype == tf.float32 for tensor in tensors)


def allreduce_slices(
    slices: Any, name: str | None, options: ReduceOptions, allow_single: bool = False
) -> Any:
    """Return IndexedSlices with the rows of all ranks, each listed once; they travel uncompressed. allow_single: a
    rank that is not in the set keeps its own rows; else that is an error. Raises NotImplementedError, as Horovod does,
    if the reduction is neither Average nor Sum."""
    if options.op not in (Average, Sum):
        raise NotImplementedError(
            f"IndexedSlices take Average and Sum, not {options.op.name}: use tf.convert_to_tensor first."
        )
    parts = [slices.values, slices.indices]

    def body(arrays: list[Array]) -> list[Array]:
        if allow_single and is_single_process(options.process_set):
            return _sum_equal_indices(arrays[0], arrays[1])
        label = None if name is None else f"slices.{name}"
        values, indices = allgather_arrays(arrays, label, options.process_set)
        factor = options.scale[0] * options.scale[1]
        divisor = options.process_set.size() if options.op is Average else 1
        return _sum_equal_indices(values, indices, factor, divisor)

    shapes = [[None, *tensor.shape[1:]] for tensor in parts]
    values, indices = call(body, parts, [tensor.dtype for tensor in parts], shapes)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _sum_equal_indices(values: Array, indices: Array, factor: float = 1.0, divisor: int = 1) -> list[Array]:
    """Return (values times `factor` by `divisor`, indices) with each index once, the values of equal indices summed.
    Integers are truncated towards zero, as those of tensors are. Keras squares each listed value: with an index listed
    twice, Adam would depend on how ranks share the rows."""
    rows, positions = np.unique(indices, return_inverse=True)
    integers = {"i": np.int64, "u": np.uint64}.get(values.dtype.kind)
    wide: Any = integers or (np.float32 if values.dtype.itemsize < 4 else values.dtype)
    summed = np.zeros((len(rows), *values.shape[1:]), wide)
    np.add.at(summed, positions.reshape(-1), values.astype(wide, copy=False))
    if integers is None:
        return [(summed * summed.dtype.type(factor / divisor)).astype(values.dtype, copy=False), rows]
    if factor != 1.0:
        return [np.trunc(summed * factor / divisor).astype(values.dtype), rows]
    return [(np.sign(summed) * (np.abs(summed) // wide(divisor))).astype(values.dtype), rows]


@no_autograph
def allgather(
    tensor: Tensor, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = ALL
) -> Tensor:
    """Concatenate all ranks' tensors along dimension 0, in which they may differ. Differentiable."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@no_autograph
def grouped_allgather(
    tensors: Tensors, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = ALL
) -> list[Tensor]:
    """Allgather several tensors as one operation. Differentiable."""
    if not tensors:
        raise InvalidInput("a grouped operation takes at least one tensor.")

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*inputs: Tensor) -> tuple[list[Tensor], Any]:
        def gradient(*upstream: Tensor) -> list[Tensor]:
            rows = tf.stack([tf.shape(tensor)[0] for tensor in inputs])
            counts = _allgather([rows[None]], None, process_set)[0]
            mine = _evaluate(process_set.rank)
            averages = allreduce_tensors(upstream, None, ReduceOptions(Average, process_set=process_set))
            firsts = tf.reduce_sum(counts[:mine], axis=0)
            return [whole[firsts[i] : firsts[i] + rows[i]] for i, whole in enumerate(averages)]

        return _allgather(inputs, name, process_set), gradient

    as_tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return list(differentiable(*(t[None] if t.shape.rank == 0 else t for t in as_tensors)))


def _allgather(tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[Tensor]:
    def body(arrays: list[Array]) -> Sequence[Array]:
        return allgather_arrays(arrays, name, process_set)

    shapes = [[None, *tensor.shape[1:]] if tensor.shape.rank else None for tensor in tensors]
    return call(body, tensors, [tensor.dtype for tensor in tensors], shapes)


@no_autograph
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = ALL,
) -> Tensor:
    """Return the tensor of rank `root_rank` of the world. Differentiable."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(value: Tensor) -> tuple[Tensor, Any]:
        def gradient(upstream: Tensor) -> Tensor:
            average = allreduce_tensors([upstream], None, ReduceOptions(Average, process_set=process_set))[0]
            root = process_sets.find_root_index(process_set, root_rank)
            is_root = tf.equal(_evaluate(process_set.rank), root)
            return tf.where(is_root, average, tf.zeros_like(average))

        return broadcast_all([value], root_rank, name, process_set)[0], gradient

    return differentiable(tf.convert_to_tensor(tensor))


def broadcast_all(
    tensors: Tensors, root_rank: int, name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    """Broadcast several tensors as one operation."""

    def body(arrays: list[Array]) -> list[Array]:
        results = copy_arrays(arrays).views
        operations.broadcast_arrays(results, root_rank, name, process_set)
        return results

    return call(body, tensors, [t.dtype for t in tensors], [t.shape for t in tensors])


@no_autograph
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = ALL
) -> list[Any]:
    """Overwrite variables with those of rank `root_rank`, as one operation.

    Returns:
        The same variables; in a graph, what their assignments return: a session runs nothing that is not asked for.
    """
    assignments = _overwrite(variables, root_rank, name, process_set)
    return list(variables) if tf.executing_eagerly() else assignments


def _overwrite(
    variables: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[Any]:
    """Returns what the assignments return: in a graph, the operations that make them."""
    inner = [unwrap_variable(variable) for variable in variables]
    if not inner:
        return []
    values = broadcast_all(list(map(tf.convert_to_tensor, inner)), root_rank, name, process_set)
    return [variable.assign(value) for variable, value in zip(inner, values, strict=True)]


@no_autograph
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = ALL, inplace: bool = False
) -> Any:
    """Overwrite variables, of TensorFlow or Keras, with those of `root_rank`. inplace: not used.

    Returns:
        In a graph the operation that does so; None in eager mode.
    """
    assignments = _overwrite(list(variables), root_rank, "variables", process_set)
    return None if tf.executing_eagerly() else tf.group(*assignments)


def broadcast_object(
    obj: T, root_rank: int = 0, session: object = None, name: str | None = None, process_set: ProcessSet = ALL
) -> T:
    """Return the object of rank `root_rank`. session: only None, TensorFlow 2 has none."""
    _refuse_session(session)
    return operations.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: T, session: object = None, name: str | None = None, process_set: ProcessSet = ALL
) -> list[T]:
    """Return the objects of all ranks, in rank order. session: only None, TensorFlow 2 has none."""
    _refuse_session(session)
    return operations.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: object = None, name: str | None = None, process_set: ProcessSet = ALL
) -> Callable[[Any], Any]:
    """Return a function that broadcasts an object of `root_rank`. session: only None, TensorFlow 2 has none."""
    _refuse_session(session)
    return lambda obj: operations.broadcast_object(obj, root_rank, name, process_set)


def _refuse_session(session: object) -> None:
    if session is not None:
        raise InvalidInput("there are no sessions in TensorFlow 2: leave session out.")


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that broadcasts the global variables of a TensorFlow 1 graph.

    Raises:
        RuntimeError: in eager mode, whose variables are not global; Horovod's error, too.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "TensorFlow 2 has no global variables: call broadcast_variables(model.variables, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


@no_autograph
def join() -> Tensor:
    """Take part in the allreduces of the other ranks without contributing, until all ranks have joined.

    Averages still divide by the world's size. Allgather, broadcast, alltoall and reducescatter need all ranks, and so
    do gradients with missing rows.

    Returns:
        The rank that joined last, as a scalar int32 tensor.

    Raises:
        CollectiveError: the world changed.
    """

    def body(arrays: list[Array]) -> list[Array]:
        return [np.array(int(get_queue().join().wait()[0][0]), np.int32)]

    return call(body, [], [tf.int32], [[]])[0]


@no_autograph
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = ALL,
) -> Any:
    """Send part r of the tensor, cut along dimension 0, to rank r; return the received parts in rank order.

    Differentiable.

    Args:
        splits: rows for each rank; the result is then (tensor, rows received from each rank). None: equal parts.
    """
    given = tf.convert_to_tensor(tensor)
    if given.shape.rank == 0:
        raise InvalidInput("alltoall cuts its tensor along the first dimension; a scalar has none.")

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(rows: Tensor) -> tuple[tuple[Tensor, Tensor], Any]:
        received, counts = _alltoall(rows, splits, name, process_set)

        def gradient(upstream: Tensor, _: Tensor) -> Tensor:
            # After tf.gather, for example, it is IndexedSlices.
            return _alltoall(tf.convert_to_tensor(upstream), counts, None, process_set)[0]

        return (received, counts), gradient

    received, counts = differentiable(given)
    return received if splits is None else (received, counts)


def _alltoall(tensor: Tensor, splits: Any, name: str | None, ranks: ProcessSet) -> tuple[Tensor, Tensor]:
    sent = [] if splits is None else [tf.cast(tf.convert_to_tensor(splits), tf.int32)]

    def body(arrays: list[Array]) -> list[Array]:
        rows, *parts = arrays
        splits = [int(n) for n in parts[0]] if parts else None
        received, counts = submit("alltoall", name, [rows], ranks, splits).wait()
        return [received, counts.astype(np.int32)]

    shapes = [[None, *tensor.shape[1:]], [None]]
    received, counts = call(body, [tensor, *sent], [tensor.dtype, tf.int32], shapes)
    return received, counts


@no_autograph
def reducescatter(  # noqa: PLR0913 - name and arguments are Horovod's
    tensor: Tensor,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = ALL,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's part of the reduced tensor, cut along dimension 0; the first ranks get one row more if the
    rows cannot be divided evenly. Differentiable for Average and Sum. device_dense, ignore_name_scope: not used."""
    scale = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], "", compression, op, process_set, *scale, name)[0]


@no_autograph
def grouped_reducescatter(  # noqa: PLR0913
    tensors: Tensors,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Tensor]:
    """Reducescatter several tensors as one operation. Differentiable for Average and Sum. device_dense: not used."""
    scale = prescale_factor, postscale_factor
    options = ReduceOptions.from_reducescatter_args(len(tensors), op, scale, process_set, compression)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: Tensor) -> tuple[list[Tensor], Any]:
        def gradient(*upstream: Tensor) -> list[Tensor]:
            factor = options.reducescatter_gradient_factor(lambda: tf.cast(size_op(process_set), tf.float64))
            wholes = grouped_allgather(upstream, process_set=process_set)
            return [whole * tf.cast(factor, whole.dtype) for whole in wholes]

        return _reducescatter(given, name, options), gradient

    return list(differentiable(*(tf.convert_to_tensor(tensor) for tensor in tensors)))


def _reducescatter(tensors: Tensors, name: str | None, options: ReduceOptions) -> list[Tensor]:
    _, exchanged, decompress = compress_tensors(tensors, options, all_float32=False)

    def body(arrays: list[Array]) -> Sequence[Array]:
        return reducescatter_arrays(arrays, name, options)

    shapes = [[None, *tensor.shape[1:]] if tensor.shape.rank else None for tensor in exchanged]
    return decompress(call(body, exchanged, [tensor.dtype for tensor in exchanged], shapes))


@no_autograph
def size_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Tensor:
    """Return the number of ranks in the set. All functions here return scalar int32 tensors."""
    return _evaluate(_as_set(process_set_id).size)


@no_autograph
def rank_op(name: str | None = None) -> Tensor:
    """Return the rank of this process in the world."""
    return _evaluate(process_sets.rank)


@no_autograph
def local_size_op(name: str | None = None) -> Tensor:
    """Return the number of workers on this host."""
    return _evaluate(process_sets.local_size)


@no_autograph
def local_rank_op(name: str | None = None) -> Tensor:
    """Return the rank of this process among the workers on this host."""
    return _evaluate(process_sets.local_rank)


@no_autograph
def process_set_included_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Tensor:
    """Return 1 if this process is in the set, else 0."""
    return _evaluate(_as_set(process_set_id).included)


def _evaluate(get: Callable[[], int]) -> Tensor:
    def body(arrays: list[Array]) -> list[Array]:
        return [np.array(int(get()), np.int32)]

    return call(body, [], [tf.int32], [[]])[0]


def _as_set(process_set: ProcessSet | int) -> ProcessSet:
    return process_set if isinstance(process_set, ProcessSet) else process_sets.get_process_set(process_set)
