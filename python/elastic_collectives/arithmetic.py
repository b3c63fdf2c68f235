"""Numbers of 16 bits and factors as the engine has them, in plain numpy. bfloat16 is stored as uint16. Pure."""

from __future__ import annotations

import numpy as np

from elastic_collectives.group import Array


def widen(array: Array, dtype: str) -> Array:
    """Convert 16-bit floats to float32; return any other array itself."""
    if dtype == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "float16" else array


def narrow(array: Array, dtype: str) -> Array:
    """Round float32 to a 16-bit float dtype (bfloat16 as uint16), to nearest even; return other dtypes unchanged."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    if dtype != "bfloat16":
        return array
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def apply_scale(array: Array, times: float, over: int = 1) -> Array:
    """Return array * times / over; integers are truncated towards zero."""
    if times == 1.0 and over == 1:
        return array
    if array.dtype.kind not in "iu":
        return np.asarray(array.astype(np.float64) * (times / over)).astype(array.dtype)
    if times == 1.0:
        # The divisor may not fit into 8 bits
        whole = np.int64(over) if array.dtype.kind == "i" else np.uint64(over)
        return ((array - np.fmod(array, whole)) // whole).astype(array.dtype)
    limits = np.iinfo(array.dtype)
    return np.clip(np.trunc(array * times / over), limits.min, limits.max).astype(array.dtype)
