"""`allreduce` and `grouped_allreduce` under Horovod's names, eager and in graphs. All ranks of the set must call them.

Names identify operations. Unnamed operations are matched by the order in which each rank requests its unnamed ones. An
average of integers is truncated towards zero; 16-bit floats are accumulated as float32; a bool's sum is "or". All raise
`CollectiveError` if ranks disagree or the world broke; a graph raises it in the thread that runs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ALL, ProcessSet, is_single_process
from spark_elastic.gradients.reduction import Average, ReduceOp, ReduceOptions, Sum
from spark_elastic.horovod.ops.compression import Compression
from spark_elastic.horovod.ops.operations import allgather_arrays, allreduce_arrays, compress_tensors
from spark_elastic.horovod.tensorflow.arrays import Tensor, Tensors, call, copy_arrays, no_autograph


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
