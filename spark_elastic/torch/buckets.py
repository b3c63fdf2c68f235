"""How gradients are cut into buckets: a pure function of names, shapes, dtypes and bucket size (R7).

PURE: no framework, no thread. Buckets follow the order in which backward produces gradients, last parameter first;
the first bucket is small, so that its exchange can begin early. A bucket holds one dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_BUCKET = 1 << 20  # bytes
ALIGN = 64  # bytes between the beginnings of two gradients: a cache line


@dataclass(frozen=True)
class Spec:
    """A parameter: its name, shape, and dtype as numpy names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slice:
    """Where a parameter lies in its bucket: elements [offset, offset + numel). `index`: its number in the model."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    dtype: str
    numel: int
    slices: tuple[Slice, ...]


def layout(specs: Sequence[Spec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of about `bucket_bytes` in launch order; a parameter larger than that has a bucket of its own."""
    buckets: list[Bucket] = []
    slices: list[Slice] = []
    end = 0
    for index in reversed(range(len(specs))):
        spec = specs[index]
        limit = (FIRST_BUCKET if not buckets else bucket_bytes) // spec.itemsize
        if slices and (specs[slices[0].index].dtype != spec.dtype or end + spec.numel > limit):
            buckets.append(Bucket(specs[slices[0].index].dtype, end, tuple(slices)))
            slices, end = [], 0
        slices.append(Slice(index, end, spec.numel))
        step = ALIGN // spec.itemsize
        end = -(-(end + spec.numel) // step) * step
    if slices:
        buckets.append(Bucket(specs[slices[0].index].dtype, end, tuple(slices)))
    return tuple(buckets)


def layout_hash(specs: Sequence[Spec], bucket_bytes: int) -> int:
    """64 bits that differ where two ranks would cut differently."""
    text = repr([(s.name, s.shape, s.dtype) for s in specs]) + repr(bucket_bytes)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
