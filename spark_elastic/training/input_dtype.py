"""In which precision a model of torch's is given its columns: one rule for training and for predictions, whose
processes load no trainer. Pure looking at parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def input_dtype(parameters: Iterable[Any], default: Any) -> Any:
    """That of the first parameter that is trained; a frozen one may be of fewer bits. default: where there is none."""
    floats = [parameter for parameter in parameters if parameter.is_floating_point()]
    trained = [parameter for parameter in floats if parameter.requires_grad]
    return next((parameter.dtype for parameter in trained or floats), default)
