"""What reductions compute, in plain numpy: the fake's arithmetic, and a yardstick for the engine's.

Pure. 16-bit floats are accumulated as float32 and rounded once; bfloat16 lives in uint16, since numpy has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_collectives.group import Array

_FOLDS: dict[str, np.ufunc] = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


def widened(array: Array, dtype: str) -> Array:
    """16-bit floats as float32; anything else as it is. May be `array` itself."""
    if dtype == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "float16" else array


def narrowed(array: Array, dtype: str) -> Array:
    """float32 as 16-bit floats (bfloat16 as uint16), to nearest even; for any other dtype as it is."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    if dtype != "bfloat16":
        return array
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def scaled(array: Array, times: float, over: int = 1) -> Array:
    """array * times / over; integers are cut towards zero."""
    if times == 1.0 and over == 1:
        return array
    if array.dtype.kind not in "iu":
        return np.asarray(array.astype(np.float64) * (times / over)).astype(array.dtype)
    if times == 1.0:
        whole = np.int64(over) if array.dtype.kind == "i" else np.uint64(over)  # beyond what 8 bits hold
        return ((array - np.fmod(array, whole)) // whole).astype(array.dtype)
    limits = np.iinfo(array.dtype)
    return np.clip(np.trunc(array * times / over), limits.min, limits.max).astype(array.dtype)


def reduced(parts: Sequence[Array], dtype: str, op: str, after: float) -> Array:
    """All ranks' arrays as one, folded in rank order."""
    wide = [widened(part, dtype) for part in parts]
    if op == "adasum":
        return narrowed(scaled(_adasum(wide), after), dtype)
    result = wide[0].copy()
    for part in wide[1:]:
        _FOLDS[op](result, part, out=result)
    return narrowed(scaled(result, after, len(parts) if op == "average" else 1), dtype)


def _adasum(parts: Sequence[Array]) -> Array:
    power = 1 << (len(parts).bit_length() - 1)
    level = [*parts]
    for extra, part in enumerate(level[power:]):
        level[extra] = _adaptive(level[extra], part)
    level = level[:power]
    while len(level) > 1:
        level = [_adaptive(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].copy()


def _adaptive(a: Array, b: Array) -> Array:
    x, y = a.astype(np.float64), b.astype(np.float64)
    aa, bb, ab = (float(np.sum(u * v)) for u, v in ((x, x), (y, y), (x, y)))
    of_a, of_b = (1 - ab / (2 * norm) if norm > 0 else 1.0 for norm in (aa, bb))
    return np.asarray(of_a * x + of_b * y).astype(a.dtype)
