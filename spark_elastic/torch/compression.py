"""Compressors of Horovod for torch: the public name of `horovod.torch.compression`."""

from spark_elastic.horovod.torch.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
