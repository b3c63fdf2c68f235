"""Horovod's compressors for TensorFlow tensors. Values only."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from spark_elastic.gradients.reduction import Compressor, NoneCompressor
from spark_elastic.horovod.tensorflow.arrays import Tensor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends tensors as float16: 11 bits of precision, up to 65504."""

    wire = "fp16"
    dtype = tf.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        wide = tensor.dtype.is_floating and tensor.dtype.size > 2
        return (tf.cast(tensor, cls.dtype), tensor.dtype) if wide else (tensor, None)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Sends tensors as bfloat16: 8 bits of precision, the range of float32."""

    wire = "bf16"
    dtype = tf.bfloat16


class Compression:
    """The values of `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
