"""Reductions in plain numpy: the reference for the engine's results, and what fake groups compute.

Pure. 16-bit floats are accumulated as float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_collectives.operands import Array, apply_scale, narrow, widen

_FOLDS: dict[str, np.ufunc] = dict.fromkeys(("sum", "average"), np.add)
_FOLDS |= {"min": np.minimum, "max": np.maximum, "product": np.multiply}


def reduce_parts(parts: Sequence[Array], dtype: str, op: str, after: float) -> Array:
    """Reduce the arrays of all ranks to one, in rank order."""
    wide = [widen(part, dtype) for part in parts]
    if op == "adasum":
        return narrow(apply_scale(_adasum(wide), after), dtype)
    result = wide[0].copy()
    for part in wide[1:]:
        _FOLDS[op](result, part, out=result)
    return narrow(scale_and_divide(result, after, len(parts) if op == "average" else 1), dtype)


def scale_and_divide(array: Array, times: float, over: int) -> Array:
    """Return array * times / over; integers are truncated towards zero."""
    if array.dtype.kind not in "iu" or over == 1:
        return apply_scale(array, times / over)
    if times == 1.0:
        # The divisor may not fit into 8 bits
        whole = np.int64(over) if array.dtype.kind == "i" else np.uint64(over)
        return ((array - np.fmod(array, whole)) // whole).astype(array.dtype)
    limits = np.iinfo(array.dtype)
    return np.clip(np.trunc(array * times / over), limits.min, limits.max).astype(array.dtype)


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
