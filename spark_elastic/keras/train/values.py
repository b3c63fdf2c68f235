"""Values as JSON with arrays beside them, and back; what is neither is left out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_ARRAY = "__array__"


def plain(value: Any, arrays: list[Array]) -> Any:
    """The value with arrays put into `arrays`, and a number in their place.

    Raises:
        TypeError: it holds something else than numbers, text, lists, dicts with text for keys, and arrays.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        arrays.append(value.copy())
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [plain(item, arrays) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, arrays) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def restored(value: Any, arrays: Sequence[Array]) -> Any:
    """What `plain` was given; tuples as lists."""
    if isinstance(value, list):
        return [restored(item, arrays) for item in value]
    if isinstance(value, Mapping):
        if set(value) == {_ARRAY}:
            return np.array(arrays[value[_ARRAY]])
        return {key: restored(item, arrays) for key, item in value.items()}
    return value


def is_plain(value: Any) -> bool:
    """Whether `plain` takes it."""
    try:
        plain(value, [])
    except TypeError:
        return False
    return True
