"""How tensors travel in fewer bytes, under Horovod's names. Values only.

The built-in ones name a wire format of the engine: float32 is cut to 16 bits on its way and accumulated as float32. One
of a user's own is a `Compressor` whose two methods surround the exchange.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from spark_elastic.errors import InvalidInput
from spark_elastic.tensorflow.arrays import Tensor


class Compressor:
    """wire: the engine's format for float32; None: `compress` and `decompress` say it all."""

    wire: str | None = None

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """(what is exchanged, what `decompress` needs)"""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The result, from the result of the exchange."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class NoneCompressor(Compressor):
    """As they are."""


class FP16Compressor(Compressor):
    """As float16: 11 bits of precision, up to 65504."""

    wire = "fp16"

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return _narrowed(tensor, tf.float16)


class BF16Compressor(Compressor):
    """As bfloat16: 8 bits of precision, the range of float32."""

    wire = "bf16"

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return _narrowed(tensor, tf.bfloat16)


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


def _narrowed(tensor: Tensor, dtype: Any) -> tuple[Tensor, Any]:
    wide = tensor.dtype.is_floating and tensor.dtype.size > 2
    return (tf.cast(tensor, dtype), tensor.dtype) if wide else (tensor, None)
