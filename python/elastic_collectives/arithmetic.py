"""Reductions in plain numpy: for a process that trains alone, and as the reference for the engine's results.

Pure. 16-bit floats are accumulated as float32 and rounded once; bfloat16 is stored as uint16, which numpy has.
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


def reduce_parts(parts: Sequence[Array], dtype: str, op: str, after: float) -> Array:
    """Reduce the arrays of all ranks to one, in rank order."""
    wide = [widen(part, dtype) for part in parts]
    if op == "adasum":
        return narrow(apply_scale(_adasum(wide), after), dtype)
    result = wide[0].copy()
    for part in wide[1:]:
        _FOLDS[op](result, part, out=result)
    return narrow(apply_scale(result, after, len(parts) if op == "average" else 1), dtype)


def _adasum(parts: Sequence[Array]) -> Array:
    power = 1 << (len(parts).bit_length() - 1)
    level = [*parts]
    for extra, part in enumerate(level[power:]):
        level[extra] = _combine_adaptively(level[extra], part)
    level = level[:power]
    while len(level) > 1:
        level = [_combine_adaptively(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].copy()


def _combine_adaptively(a: Array, b: Array) -> Array:
    x, y = a.astype(np.float64), b.astype(np.float64)
    aa, bb, ab = (float(np.sum(u * v)) for u, v in ((x, x), (y, y), (x, y)))
    of_a, of_b = (1 - ab / (2 * norm) if norm > 0 else 1.0 for norm in (aa, bb))
    return np.asarray(of_a * x + of_b * y).astype(a.dtype)
