"""Horovod's compressors for torch tensors. Values only."""

from __future__ import annotations

from typing import Any

import torch

from spark_elastic.gradients.reduction import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends tensors as float16: 11 bits of precision, up to 65504."""

    wire = "fp16"
    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        wide = tensor.is_floating_point() and tensor.element_size() > 2
        return (tensor.to(cls.dtype), tensor.dtype) if wide else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Sends tensors as bfloat16: 8 bits of precision, the range of float32."""

    wire = "bf16"
    dtype = torch.bfloat16


class Compression:
    """The values of `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
