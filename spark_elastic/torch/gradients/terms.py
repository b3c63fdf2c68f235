"""How gradients are exchanged: divided, compressed, cut into buckets. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from spark_elastic.config import operations_from_env
from spark_elastic.ops.compression import Compressor
from spark_elastic.torch.gradients.buckets import BUCKET_BYTES


@dataclass(frozen=True)
class Terms:
    """How gradients are exchanged; the same on all ranks.

    bucket_bytes, groups: see `buckets.layout`; tuned: the tuner finds another size. average: divide by the world's
    size; predivide: by so much before the sum and by the rest after it. wire: how float32 travels, None for as it is.
    compressor: a user's own, that surrounds the exchange of each gradient that has all its rows, on the host.
    sparse: gradients with rows missing are "refused", made "dense", or "kept", from a world's second step on.
    warn_after, wait_at_most: see `stalls.inspected`.
    """

    bucket_bytes: int = BUCKET_BYTES
    tuned: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    average: bool = False
    predivide: float = 1.0
    wire: str | None = None
    compressor: type[Compressor] | None = None
    sparse: str = "refused"
    warn_after: float = math.inf
    wait_at_most: float | None = None

    def factors(self, size: int) -> tuple[float, float]:
        """Factors (before, after) the sum."""
        return 1.0 / self.predivide, self.predivide / (size if self.average else 1.0)

    @property
    def spoken(self) -> str:
        """What all ranks must have in common, in words."""
        said = ["averaged" if self.average else "summed"]
        if self.predivide != 1.0:
            said.append(f"divided by {self.predivide!r} before")
        if self.wire is not None:
            said.append(f"sent as {self.wire}")
        if self.compressor is not None:
            said.append(f"compressed by {self.compressor.__qualname__}")
        return ", ".join([*said, f"sparse ones {self.sparse}"])


PLAIN = Terms()  # summed as they are


def as_set(**others: Any) -> Terms:
    """With the bucket size and the stall check of this process's settings."""
    limits = operations_from_env()
    return Terms(
        bucket_bytes=limits.bucket_bytes or BUCKET_BYTES,
        tuned=limits.bucket_bytes is None,
        warn_after=limits.warn_after,
        wait_at_most=limits.wait_at_most,
        **others,
    )
