"""`SyncBatchNormalization`: batch normalisation over the rows of all ranks. Training thread only.

Two sums a pass: rows and mean, then squared deviations from that mean. Ranks may have different numbers of rows. The
gradients are those of the two differentiable reductions.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ALL, ProcessSet
from spark_elastic.gradients.reduction import ReduceOptions, Sum
from spark_elastic.horovod.tensorflow.arrays import Tensor
from spark_elastic.horovod.tensorflow.operations import allreduce_tensors


@tf.keras.utils.register_keras_serializable("spark_elastic")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc] # untyped
    """As tf.keras.layers.BatchNormalization, with the statistics of the whole batch while it trains. All ranks must
    take part in each forward and backward pass. process_set: the ranks that share statistics."""

    exchanges_statistics = True

    def __init__(self, *args: Any, process_set: ProcessSet = ALL, **kwargs: Any) -> None:
        kwargs.pop("synchronized", None)  # of tf.distribute, which this replaces
        if kwargs.pop("fused", False):  # an argument of Keras 2, which Horovod's scripts set to False
            raise InvalidInput("SyncBatchNormalization is never fused: leave fused out.")
        super().__init__(*args, **kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (mean, biased variance) of each channel over all ranks' rows that are not masked."""
        axes = self._reduction_axes
        wide = tf.cast(inputs, tf.float64)
        weight = tf.ones_like(wide) if mask is None else tf.ones_like(wide) * _spread(mask, wide)
        rows, total = tf.reduce_sum(weight, axes), tf.reduce_sum(wide * weight, axes)
        rows, total = tf.unstack(self._sum_over_ranks(tf.stack([rows, total])))
        rows = tf.maximum(rows, 1.0)
        mean = total / rows
        shape = [1 if axis in axes else wide.shape[axis] for axis in range(wide.shape.rank)]
        squares = tf.reduce_sum(tf.square(wide - tf.reshape(mean, shape)) * weight, axes)
        variance = self._sum_over_ranks(squares) / rows
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return allreduce_tensors([tensor], None, ReduceOptions(Sum, process_set=self._process_set))[0]


def _spread(mask: Tensor, like: Tensor) -> Tensor:
    mask = tf.cast(mask, like.dtype)
    ones = tf.ones([like.shape.rank - mask.shape.rank], tf.int32)
    return tf.reshape(mask, tf.concat([tf.shape(mask), ones], 0))
