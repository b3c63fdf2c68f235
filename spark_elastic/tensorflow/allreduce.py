"""`allreduce` and `grouped_allreduce`, under Horovod's names, eager and in graphs.

To be called by all ranks of the process set. Names identify operations; those without one go in the order in which each
rank asks for its unnamed ones. An average of integers is cut towards zero; 16-bit floats are accumulated as float32; a
bool's sum is "or". All raise `CollectiveError` where ranks disagree or the world broke; a graph does so to whoever runs
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.negotiation import ALLGATHER, ALLREDUCE, Request, qualify_name
from spark_elastic.ops.operations import as_engine_array, get_queue
from spark_elastic.ops.process_sets import ProcessSet, global_process_set, is_single_process
from spark_elastic.ops.reduction import Average, ReduceOp, ReduceOptions, Sum
from spark_elastic.tensorflow.arrays import Tensor, call, copy_arrays, name_of, no_autograph
from spark_elastic.tensorflow.compression import Compression


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
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Tensor:
    """The average (default), or what `op` says, of all ranks' tensors, of equal shapes. Differentiable.

    IndexedSlices are summed or averaged by gathering them, and stay such. device_dense, device_sparse,
    ignore_name_scope: of no use here.
    """
    how = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set, compression)
    if isinstance(tensor, tf.IndexedSlices):
        return allreduce_slices(tensor, name, how)
    return allreduce_tensors([tensor], name, how)[0]


@no_autograph
def grouped_allreduce(  # noqa: PLR0913
    tensors: Sequence[Tensor],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> list[Tensor]:
    """`allreduce` of several tensors as one operation. Differentiable."""
    how = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set, compression)
    if not tensors:
        raise InvalidInput("a grouped operation takes at least one tensor.")
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return [
            allreduce(t, None, "", "", compression, how.op, *how.scale, None, process_set) for t in tensors
        ]
    return allreduce_tensors(tensors, name, how)


@no_autograph
def allreduce_tensors(tensors: Sequence[Tensor], name: str | None, how: ReduceOptions) -> list[Tensor]:
    """As one operation, differentiable: the gradient is reduced in the same way."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: Tensor) -> tuple[list[Tensor], Any]:
        def gradient(*upstream: Tensor) -> list[Tensor]:
            return allreduce_tensors(upstream, None, how)

        return _allreduce(given, name, how), gradient

    return list(differentiable(*(tf.convert_to_tensor(tensor) for tensor in tensors)))


def _allreduce(tensors: Sequence[Tensor], name: str | None, how: ReduceOptions) -> list[Tensor]:
    wire, squeezed = compress_tensors(tensors, how)
    dtypes = [tensor.dtype for tensor, _ in squeezed]
    names = tuple(name_of(dtype) for dtype in dtypes)

    def body(arrays: list[Array]) -> list[Array]:
        results = copy_arrays(arrays).views
        request = Request(
            ALLREDUCE,
            qualify_name(ALLREDUCE, name),
            names,
            tuple(array.shape for array in results),
            how.op.value,
            how.scale,
            wire,
        )
        given = [as_engine_array(array) for array in results]
        get_queue(how.process_set).submit(request, given, awaited=True).wait()
        return results

    results = call(body, [tensor for tensor, _ in squeezed], dtypes, [tensor.shape for tensor in tensors])
    return [how.compression.decompress(r, ctx) for r, (_, ctx) in zip(results, squeezed, strict=True)]


def compress_tensors(
    tensors: Sequence[Tensor], how: ReduceOptions
) -> tuple[str | None, list[tuple[Tensor, Any]]]:
    """(the engine's wire format, what is exchanged and what undoes its compression)"""
    wire = how.wire_format(all(tensor.dtype == tf.float32 for tensor in tensors))
    if wire is not None:
        return wire, [(tensor, None) for tensor in tensors]
    return None, [how.compression.compress(tensor) for tensor in tensors]


# IndexedSlices of all ranks, concatenated: their sum or average, without the rows that nobody has.


def allreduce_slices(slices: Any, name: str | None, how: ReduceOptions, allow_single: bool = False) -> Any:
    """IndexedSlices with the rows of all ranks, each listed once; they travel as they are, whatever the compression.

    alone: ranks that are not in the set keep their own.

    Raises:
        InvalidInput: the reduction is neither Average nor Sum.
    """
    if how.op not in (Average, Sum):
        raise InvalidInput(
            f"IndexedSlices take Average and Sum, not {how.op.name}: use tf.convert_to_tensor first."
        )
    given = [slices.values, slices.indices]
    names = tuple(name_of(tensor.dtype) for tensor in given)

    def body(arrays: list[Array]) -> list[Array]:
        if allow_single and is_single_process(how.process_set):
            return _each_once(arrays[0], arrays[1])
        request = Request(
            ALLGATHER,
            qualify_name("slices", name),
            names,
            tuple((-1, *array.shape[1:]) for array in arrays),
        )
        rows = [as_engine_array(array) for array in arrays]
        channel = get_queue(how.process_set)
        values, indices = channel.submit(request, rows, awaited=True).wait()
        factor = how.scale[0] * how.scale[1] / (how.process_set.size() if how.op is Average else 1)
        return _each_once(values.view(arrays[0].dtype), indices, factor)

    shapes = [[None, *tensor.shape[1:]] for tensor in given]
    values, indices = call(body, given, [tensor.dtype for tensor in given], shapes)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _each_once(values: Array, indices: Array, factor: float = 1.0) -> list[Array]:
    """(values times `factor`, indices), the values of an index summed.

    Keras squares what is listed: with an index listed twice, Adam would depend on how rows are spread over ranks.
    """
    rows, places = np.unique(indices, return_inverse=True)
    wide = np.float32 if values.dtype.itemsize < 4 else values.dtype
    summed = np.zeros((len(rows), *values.shape[1:]), wide)
    np.add.at(summed, places.reshape(-1), values.astype(wide, copy=False))
    return [(summed * summed.dtype.type(factor)).astype(values.dtype, copy=False), rows]
