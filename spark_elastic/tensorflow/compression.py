"""Compressors of Horovod for TensorFlow: the public name of `horovod.tensorflow.compression`."""

from spark_elastic.horovod.tensorflow.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
