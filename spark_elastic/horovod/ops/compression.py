"""Horovod's compressors, for tensors of torch and of TensorFlow."""

from __future__ import annotations

import sys
from typing import Any

from spark_elastic.gradients.reduction import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends tensors as float16: 11 bits of precision, up to 65504."""

    wire = "fp16"
    dtype = "float16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        is_wide = "float32" in str(tensor.dtype) or "float64" in str(tensor.dtype)
        return (_cast(tensor, cls.dtype), tensor.dtype) if is_wide else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else _cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Sends tensors as bfloat16: 8 bits of precision, the range of float32."""

    wire = "bf16"
    dtype = "bfloat16"


class Compression:
    """The values of `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _cast(tensor: Any, dtype: Any) -> Any:
    """dtype: one of the tensor's framework, or a name."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return sys.modules["tensorflow"].cast(tensor, dtype)
