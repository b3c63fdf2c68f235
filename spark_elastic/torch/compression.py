"""How tensors travel in fewer bytes, under Horovod's names. Values only.

The built-in ones name a wire format of the engine: float32 is cut to 16 bits on its way and accumulated as float32. One
of a user's own is a `Compressor` whose two methods surround the exchange.
"""

from __future__ import annotations

from typing import Any

import torch

from spark_elastic.errors import InvalidInput


class Compressor:
    """wire: the engine's format for tensors of 32 and 64 bits; None: `compress` and `decompress` say it all."""

    wire: str | None = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(what is exchanged, what `decompress` needs)"""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The result, from the result of the exchange."""
        return tensor


class NoneCompressor(Compressor):
    """As they are."""


class FP16Compressor(Compressor):
    """As float16: 11 bits of precision, up to 65504."""

    wire = "fp16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _narrowed(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """As bfloat16: 8 bits of precision, the range of float32."""

    wire = "bf16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _narrowed(tensor, torch.bfloat16)


class Compression:
    """What `compression=` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def checked_compression(compression: object) -> type[Compressor]:
    """None is `Compression.none`.

    Raises:
        InvalidInput: it is no Compressor.
    """
    if compression is None:
        return NoneCompressor
    kind = compression if isinstance(compression, type) else type(compression)
    if not issubclass(kind, Compressor):
        raise InvalidInput(
            f"compression must be Compression.none, fp16, bf16 or a Compressor of your own; got {compression!r}."
        )
    return kind


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    wide = tensor.is_floating_point() and tensor.element_size() > 2
    return (tensor.to(dtype), tensor.dtype) if wide else (tensor, None)
