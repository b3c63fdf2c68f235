"""Alltoall and reducescatter under Horovod's names: as in `allreduce` of names, orders and errors.

Gradients are as in the last releases of Horovod: of an alltoall those of the sum of all ranks' losses, of a
reducescatter these times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.negotiation import ALLTOALL, REDUCESCATTER, Request, qualify_name
from spark_elastic.ops.operations import as_engine_array, get_queue
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduction import Average, ReduceOp, ReduceOptions
from spark_elastic.tensorflow.arrays import Tensor, call, name_of, no_autograph
from spark_elastic.tensorflow.compression import Compression
from spark_elastic.tensorflow.gathering import grouped_allgather
from spark_elastic.tensorflow.topology_ops import size_op


@no_autograph
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank r gets the r-th part of every rank's tensor, cut along dimension 0, in rank order. Differentiable.

    splits: rows for each rank; then the result is (tensor, rows received from each). None: equal parts, and the tensor
    alone.
    """
    given = tf.convert_to_tensor(tensor)
    if given.shape.rank == 0:
        raise InvalidInput("alltoall cuts its tensor along the first dimension; a scalar has none.")

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(rows: Tensor) -> tuple[tuple[Tensor, Tensor], Any]:
        received, came = _alltoall(rows, splits, name, process_set)

        def gradient(upstream: Tensor, _: Tensor) -> Tensor:
            return _alltoall(upstream, came, None, process_set)[0]

        return (received, came), gradient

    received, came = differentiable(given)
    return received if splits is None else (received, came)


def _alltoall(
    tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    dtype = name_of(tensor.dtype)
    sent = [] if splits is None else [tf.cast(tf.convert_to_tensor(splits), tf.int32)]

    def body(arrays: list[Array]) -> list[Array]:
        rows, *parts = arrays
        request = Request(ALLTOALL, qualify_name(ALLTOALL, name), (dtype,), ((-1, *rows.shape[1:]),))
        operation = get_queue(process_set).submit(
            request, [as_engine_array(rows)], [int(n) for n in parts[0]] if parts else None, awaited=True
        )
        received, came = operation.wait()
        return [received, came.astype(np.int32)]

    shapes = [[None, *tensor.shape[1:]], [None]]
    received, came = call(body, [tensor, *sent], [tensor.dtype, tf.int32], shapes)
    return received, came


@no_autograph
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's part of what `allreduce` gives, cut along dimension 0; the first ranks have a row more where it does
    not divide. Differentiable for Average and Sum."""
    scale = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, compression, op, process_set, *scale)[0]


@no_autograph
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one operation. Differentiable for Average and Sum."""
    scale = prescale_factor, postscale_factor
    how = ReduceOptions.from_reducescatter_args(len(tensors), op, scale, process_set, compression)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: Tensor) -> tuple[list[Tensor], Any]:
        def gradient(*upstream: Tensor) -> list[Tensor]:
            return _gather_gradients(upstream, how)

        return _reducescatter(given, name, how), gradient

    return list(differentiable(*(tf.convert_to_tensor(tensor) for tensor in tensors)))


def _gather_gradients(upstream: Sequence[Tensor], how: ReduceOptions) -> list[Tensor]:
    factor = how.reducescatter_gradient_factor(lambda: tf.cast(size_op(how.process_set), tf.float64))
    wholes = grouped_allgather(upstream, process_set=how.process_set)
    return [whole * tf.cast(factor, whole.dtype) for whole in wholes]


def _reducescatter(tensors: Sequence[Tensor], name: str | None, how: ReduceOptions) -> list[Tensor]:
    squeezed = [how.compression.compress(tensor) for tensor in tensors]
    given = [tensor for tensor, _ in squeezed]
    names = tuple(name_of(tensor.dtype) for tensor in given)

    def body(arrays: list[Array]) -> Sequence[Array]:
        request = Request(
            REDUCESCATTER,
            qualify_name(REDUCESCATTER, name),
            names,
            tuple(array.shape for array in arrays),
            how.op.value,
            how.scale,
        )
        rows = [as_engine_array(array) for array in arrays]
        return get_queue(how.process_set).submit(request, rows, awaited=True).wait()

    shapes = [[None, *tensor.shape[1:]] if tensor.shape.rank else None for tensor in given]
    parts = call(body, given, [tensor.dtype for tensor in given], shapes)
    return [how.compression.decompress(part, ctx) for part, (_, ctx) in zip(parts, squeezed, strict=True)]
