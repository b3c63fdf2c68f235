"""The arrays and arguments of collectives: checked before anything is sent, and 16-bit numbers in plain numpy.

Pure. An invalid argument raises a ValueError that says what to change; the group stays usable. bfloat16 is stored as
uint16."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = ("bool", *INTEGERS, *FLOATS)
OPS = ("sum", "average", "min", "max", "product", "adasum")
ALGORITHMS = ("auto", "ring", "bcube")
# Dtype.name builds a new string each time
_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}
WIRES = {None: "plain", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Reduction:
    """A validated allreduce or reducescatter."""

    array: Array  # the operand, C-contiguous
    dtype: str  # one of DTYPES: the array's own dtype, or bfloat16 stored as uint16
    op: str  # one of OPS
    shapes: tuple[Shape, ...]  # that of the array, or those of the arrays that were fused into it
    algorithm: str = "auto"  # one of ALGORITHMS
    weight: float | None = None  # this rank's weight in an average; None: all ranks weigh the same
    before: float = 1.0  # factor on the operand of this rank
    after: float = 1.0  # factor on the result
    wire: str = "plain"  # dtype on the wire: "plain" for the array's own

    def with_weights(self, weights: Sequence[float], rank: int) -> Reduction:
        """The weighted average as a sum; `weights` are those of all ranks."""
        total, own = sum(weights), weights[rank]
        return replace(self, op="sum", weight=None, before=self.before * (own / total if total else 0.0))

    @property
    def is_ignored(self) -> bool:
        """Whether this rank's factor is 0; then its array is not read, and NaNs in it do not count."""
        return self.before == 0.0 and self.op in ("sum", "average")


def signature(*parts: object) -> int:
    """A 32-bit hash of tuples, numbers and strings that is equal in all processes."""
    return zlib.crc32(repr(parts).encode())


def as_array(data: Any, writable: bool) -> Array:
    """A numpy view of `data`, never a copy. Raises ValueError if it is not C-contiguous, or read-only where it must be
    written."""
    array = data if isinstance(data, np.ndarray) else np.asarray(data)
    if not array.flags.c_contiguous:
        raise ValueError("collectives take C-contiguous arrays; use numpy.ascontiguousarray first.")
    if writable and not array.flags.writeable:
        raise ValueError("this collective works in place and the array is read-only; pass a writable one.")
    return array


def as_result(out: Array | None, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """The array that receives a result: `out`, or a new one. Raises ValueError if `out` has another shape or dtype, is
    not C-contiguous, or is read-only."""
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError(
            f"out must be a writable C-contiguous array of shape {shape} and {dtype}; got {out.shape}, {out.dtype}."
        )
    return out


def as_rows(data: Any) -> Array:
    """A numpy view of an array that the collective splits along its first dimension. Raises ValueError if it has none,
    or is not C-contiguous."""
    array = as_array(data, writable=False)
    if array.ndim == 0:
        raise ValueError("this collective cuts its array along the first dimension; a scalar has none.")
    return array


def as_reduction(
    array: Array,
    op: str,
    dtype: str | None,
    weight: float | None,
    scale: tuple[float, float],
    compression: str | None,
    algorithm: str = "auto",
) -> Reduction:
    """Validate the arguments of a reduction. Raises a ValueError that names the invalid one."""
    name = _dtype_name(array, dtype)
    if op not in OPS or algorithm not in ALGORITHMS:
        raise ValueError(
            f"op must be one of {OPS} and algorithm one of {ALGORITHMS}; got {op!r}, {algorithm!r}."
        )
    if op == "adasum" and name not in FLOATS:
        raise ValueError(f"adasum takes {', '.join(FLOATS)}; got {name}.")
    if weight is not None and (op != "average" or name not in FLOATS):
        raise ValueError(f"weight is for averages of {', '.join(FLOATS)}; got op {op!r} of {name}.")
    if weight is not None and not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight must be a finite number, 0 or more; got {weight}.")
    if not all(math.isfinite(factor) for factor in scale):
        raise ValueError(f"scale must be two finite factors, before and after; got {scale}.")
    if name == "bool" and (op == "average" or tuple(scale) != (1.0, 1.0)):
        raise ValueError(
            "bool has neither averages nor factors; use op sum (or), min (and), or another dtype."
        )
    if compression not in WIRES or (compression is not None and (name != "float32" or op == "adasum")):
        raise ValueError(
            f"compression must be None, fp16 or bf16, the latter for float32 but adasum; got {compression!r}."
        )
    return Reduction(array, name, op, (array.shape,), algorithm, weight, *scale, WIRES[compression])


def _dtype_name(array: Array, dtype: str | None) -> str:
    own = _NAMES.get(array.dtype)
    name = dtype or own
    if own is None or name not in DTYPES or not array.flags.aligned:
        raise ValueError(
            f"reductions take {', '.join(DTYPES)}, native and aligned; got {dtype or array.dtype}."
        )
    if name != own and (name, own) != ("bfloat16", "uint16"):
        raise ValueError(f"dtype {name!r} cannot stand for {own}; only uint16 holds bfloat16.")
    return name


def fuse_reductions(reductions: Iterable[Reduction]) -> Iterator[Reduction]:
    """Fuse reductions of equal dtype. The caller carries out each yielded one before it asks for the next; then the
    original arrays are filled from the result."""
    batches: dict[object, list[Reduction]] = {}
    for number, reduction in enumerate(reductions):
        alone = reduction.op == "adasum"  # Adasum combines each array by its own angle
        key = number if alone else (reduction.dtype, reduction.array.dtype)
        batches.setdefault(key, []).append(reduction)
    for batch in batches.values():
        if len(batch) == 1:
            yield batch[0]
            continue
        flat = np.concatenate([reduction.array.reshape(-1) for reduction in batch])
        yield replace(batch[0], array=flat, shapes=tuple(reduction.array.shape for reduction in batch))
        parts = split(flat, [reduction.array.size for reduction in batch])
        for reduction, part in zip(batch, parts, strict=True):
            reduction.array[...] = part.reshape(reduction.array.shape)


def validate_root(root: int, size: int) -> None:
    """Raise ValueError unless `root` is a rank."""
    if not 0 <= root < size:
        raise ValueError(f"root must be in [0, {size}); got {root}.")


def validate_members(channel: int, ranks: Sequence[int] | None, rank: int, size: int) -> list[int]:
    """Return the ranks of a subgroup in order; all ranks if `ranks` is None. Raises ValueError if they do not form a
    group that includes `rank`, or the channel is that of the whole group."""
    members = list(range(size)) if ranks is None else list(ranks)
    if sorted(set(members)) != members or not members or members[0] < 0 or members[-1] >= size:
        raise ValueError(f"ranks of a subgroup must be in [0, {size}), ascending; got {members}.")
    if rank not in members:
        raise ValueError(f"rank {rank} is not among the ranks {members} of the subgroup.")
    if not 0 < channel < 1 << 63:
        raise ValueError(f"channel must be a number above 0, and the whole group has 0; got {channel}.")
    return members


def validate_splits(rows: int, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return how many of `rows` go to each of `size` ranks. Raises ValueError if `splits` do not fit, or are None and
    `rows` cannot be shared evenly."""
    if splits is None:
        if rows % size:
            raise ValueError(f"{rows} rows cannot be shared evenly by {size} ranks; pass splits.")
        return [rows // size] * size
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(
            f"splits must be {size} numbers, 0 or more, that add up to {rows}; got {list(splits)}."
        )
    return [int(part) for part in splits]


def divide_evenly(rows: int, size: int) -> list[int]:
    """Split `rows` evenly; the first parts get one row more if they do not divide."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def split(gathered: Array, lengths: Sequence[int]) -> list[Array]:
    """Split the first dimension into parts of these lengths."""
    ends = np.cumsum(lengths)
    return [gathered[end - length : end] for end, length in zip(ends, lengths, strict=True)]


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


def apply_scale(array: Array, factor: float) -> Array:
    """Return array * factor; integers are truncated towards zero."""
    if factor == 1.0:
        return array
    if array.dtype.kind not in "iu":
        return np.asarray(array.astype(np.float64) * factor).astype(array.dtype)
    limits = np.iinfo(array.dtype)
    return np.clip(np.trunc(array * factor), limits.min, limits.max).astype(array.dtype)
