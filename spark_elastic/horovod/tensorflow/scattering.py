"""Alltoall and reducescatter under Horovod's names; names, order and errors are as in `allreduce`.

Gradients are as in the last releases of Horovod: those of an alltoall belong to the sum of all ranks' losses, those of
a reducescatter to that sum times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set
from spark_elastic.gradients.reduction import Average, ReduceOp, ReduceOptions
from spark_elastic.horovod.ops.negotiation import ALLTOALL
from spark_elastic.horovod.ops.operations import compress_tensors, reducescatter_arrays, submit
from spark_elastic.horovod.tensorflow.arrays import Tensor, call, no_autograph
from spark_elastic.horovod.tensorflow.compression import Compression
from spark_elastic.horovod.tensorflow.gathering import grouped_allgather
from spark_elastic.horovod.tensorflow.topology_ops import size_op


@no_autograph
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
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


def _alltoall(
    tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    sent = [] if splits is None else [tf.cast(tf.convert_to_tensor(splits), tf.int32)]

    def body(arrays: list[Array]) -> list[Array]:
        rows, *parts = arrays
        splits = [int(n) for n in parts[0]] if parts else None
        received, counts = submit(ALLTOALL, name, [rows], process_set, splits).wait()
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
    process_set: ProcessSet = global_process_set,
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
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
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
            return _gather_gradients(upstream, options)

        return _reducescatter(given, name, options), gradient

    return list(differentiable(*(tf.convert_to_tensor(tensor) for tensor in tensors)))


def _gather_gradients(upstream: Sequence[Tensor], options: ReduceOptions) -> list[Tensor]:
    factor = options.reducescatter_gradient_factor(lambda: tf.cast(size_op(options.process_set), tf.float64))
    wholes = grouped_allgather(upstream, process_set=options.process_set)
    return [whole * tf.cast(factor, whole.dtype) for whole in wholes]


def _reducescatter(tensors: Sequence[Tensor], name: str | None, options: ReduceOptions) -> list[Tensor]:
    _, exchanged, decompress = compress_tensors(tensors, options, all_float32=False)

    def body(arrays: list[Array]) -> Sequence[Array]:
        return reducescatter_arrays(arrays, name, options)

    shapes = [[None, *tensor.shape[1:]] if tensor.shape.rank else None for tensor in exchanged]
    return decompress(call(body, exchanged, [tensor.dtype for tensor in exchanged], shapes))
