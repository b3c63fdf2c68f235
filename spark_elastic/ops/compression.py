"""How tensors travel in fewer bytes, under Horovod's names: what all frameworks share. Values only.

A compressor with a `wire` names a format of the engine: float32 is cut to 16 bits on its way and accumulated as
float32. One of a user's own is a `Compressor` whose two methods surround the exchange.
"""

from __future__ import annotations

from typing import Any

from spark_elastic.errors import InvalidInput


class Compressor:
    """wire: the engine's format for what is wider than 16 bits; None: `compress` and `decompress` say it all."""

    wire: str | None = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """(what is exchanged, what `decompress` needs)"""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The result, from the result of the exchange."""
        return tensor


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""


def checked_compression(compression: object) -> type[Compressor]:
    """None is `NoneCompressor`.

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
