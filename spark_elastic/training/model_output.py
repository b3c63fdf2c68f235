"""What a model of torch's may return besides a tensor: one rule for training and for predictions, whose processes load
no trainer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def output_parts(output: Any) -> tuple[Any, ...]:
    """The outputs, in order: of a tuple, list or dict (as transformers' models return) each member."""
    if isinstance(output, Mapping):
        return tuple(output.values())
    return tuple(output) if isinstance(output, tuple | list) else (output,)
