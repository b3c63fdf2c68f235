"""Gradients that travel as a user's own `Compressor` says. Knows no buckets; runs where these are reduced: in the
engine's thread, and for the last one in the training thread."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.compression import Compressor
from spark_elastic.torch.tensors import array_of, name_of, on_host


def allreduce_as(
    compressor: type[Compressor], group: Group, tensors: Iterable[torch.Tensor], scale: tuple[float, float]
) -> None:
    """Sum each tensor, in place, by way of what the compressor makes of it; scale: factors before and after the sum.

    Raises:
        InvalidInput: what it gives back has another shape than the tensor.
    """
    for tensor in tensors:
        compressed, ctx = compressor.compress(tensor)
        sent = on_host(compressed)
        group.allreduce(array_of(sent), dtype=name_of(sent.dtype), scale=scale)
        result = compressor.decompress(sent, ctx)
        if result.shape != tensor.shape:
            raise InvalidInput(
                f"{compressor.__name__}.decompress must give back the shape that compress was given, "
                f"{tuple(tensor.shape)}; got {tuple(result.shape)}."
            )
        tensor.copy_(result)
