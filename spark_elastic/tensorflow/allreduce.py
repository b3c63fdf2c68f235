"""`allreduce` and `grouped_allreduce`, under Horovod's names, eager and in graphs.

To be called by all ranks of the process set. Names identify operations; those without one go in the order in which each
rank asks for its unnamed ones. An average of integers is cut towards zero; 16-bit floats are accumulated as float32; a
bool's sum is "or". All raise `CollectiveError` where ranks disagree or the world broke; a graph does so to whoever runs
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.arrays import as_engine_array
from spark_elastic.ops.channels import get_queue
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduction import ReduceOp, ReduceOptions
from spark_elastic.ops.rounds import negotiation as kinds
from spark_elastic.ops.rounds.negotiation import Request
from spark_elastic.tensorflow.arrays import Tensor, call, copy_arrays, name_of, no_autograph
from spark_elastic.tensorflow.compression import Compression
from spark_elastic.tensorflow.sparse import allreduce_slices


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
    wire, squeezed = on_the_wire(tensors, how)
    dtypes = [tensor.dtype for tensor, _ in squeezed]
    names = tuple(name_of(dtype) for dtype in dtypes)

    def body(arrays: list[Array]) -> list[Array]:
        results, _ = copy_arrays(arrays)
        request = Request(
            kinds.ALLREDUCE,
            kinds.qualify_name(kinds.ALLREDUCE, name),
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


def on_the_wire(tensors: Sequence[Tensor], how: ReduceOptions) -> tuple[str | None, list[tuple[Tensor, Any]]]:
    """(the engine's wire format, what is exchanged and what undoes its compression)"""
    wire = how.wire_format(all(tensor.dtype == tf.float32 for tensor in tensors))
    if wire is not None:
        return wire, [(tensor, None) for tensor in tensors]
    return None, [how.compression.compress(tensor) for tensor in tensors]
