"""Horovod's compressors: the public names of parts of `gradients.reduction`."""

from spark_elastic.gradients.reduction import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
