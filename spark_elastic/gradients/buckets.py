"""How gradients are cut into buckets: a pure function of names, shapes, dtypes and bucket size (R7, layout).

PURE: no framework, no thread. Buckets follow the order in which backward produces gradients, last parameter first;
the first bucket is small, so that its exchange can begin early. A bucket holds one dtype, on one device.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

BUCKET_BYTES = 25 << 20
FIRST_BUCKET = 1 << 20  # bytes
ALIGN = 64  # bytes between the beginnings of two gradients: a cache line


@dataclass(frozen=True)
class ParameterSpec:
    """What the ranks must know of a parameter to cut its gradient into the same bucket."""

    name: str  # within the model, part of the layout's hash
    shape: tuple[int, ...]  # of the whole parameter
    dtype: str  # as torch names it
    itemsize: int  # bytes
    device: str = "cpu"  # of its gradient

    @property
    def kind(self) -> tuple[str, str]:
        """What all gradients of a bucket have in common."""
        return self.dtype, self.device

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slice:
    """Where a parameter lies in its bucket."""

    index: int  # its number among the parameters
    offset: int  # elements before it, padding included
    numel: int  # elements


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed by one collective."""

    dtype: str  # of all of them, as torch names it
    numel: int  # elements, padding included
    slices: tuple[Slice, ...]  # in their order in memory


def build_buckets(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int,
    groups: Sequence[Sequence[int]] = (),
    skip: Container[int] = (),
) -> tuple[Bucket, ...]:
    """Return buckets of about `bucket_bytes`, in the order in which they are summed; a larger parameter has its own.
    groups: numbers of parameters that lie in one bucket (for each dtype), whatever its size. skip: of those that lie
    in none."""
    grouped = {index for group in groups for index in group}
    free = [i for i in reversed(range(len(specs))) if i not in grouped and i not in skip]
    buckets = _pack(specs, free, bucket_bytes)
    for group in groups:
        members = sorted((i for i in group if i not in skip), key=lambda i: (specs[i].kind, -i))
        buckets += _pack(specs, members, None)
    if groups:
        buckets.sort(key=lambda bucket: -min(part.index for part in bucket.slices))  # as they become complete
    return tuple(buckets)


def _pack(specs: Sequence[ParameterSpec], order: Iterable[int], bucket_bytes: int | None) -> list[Bucket]:
    buckets: list[Bucket] = []
    slices: list[Slice] = []
    end = 0
    for index in order:
        spec = specs[index]
        most = math.inf if bucket_bytes is None else bucket_bytes
        most = most if buckets or bucket_bytes is None else min(FIRST_BUCKET, most)
        if slices and (specs[slices[0].index].kind != spec.kind or end + spec.numel > most // spec.itemsize):
            buckets.append(Bucket(specs[slices[0].index].dtype, end, tuple(slices)))
            slices, end = [], 0
        slices.append(Slice(index, end, spec.numel))
        step = ALIGN // spec.itemsize
        end = -(-(end + spec.numel) // step) * step
    if slices:
        buckets.append(Bucket(specs[slices[0].index].dtype, end, tuple(slices)))
    return buckets


def divide_into_groups(count: int, number: int) -> tuple[tuple[int, ...], ...]:
    """Divide `count` parameters into `number` groups of neighbours of about the same size."""
    ends = [count * part // number for part in range(number + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends) if a < b)


def hash_layout(specs: Sequence[ParameterSpec], buckets: Sequence[Bucket], options: str = "") -> int:
    """Return 64 bits that differ if two ranks cut their gradients differently or exchange them with other options."""
    text = repr([(s.name, s.shape, s.dtype) for s in specs]) + repr(buckets) + options
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
