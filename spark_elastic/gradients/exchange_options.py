"""How gradients are exchanged: divided, compressed, cut into buckets. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from spark_elastic.config import operations_from_env
from spark_elastic.gradients.buckets import BUCKET_BYTES
from spark_elastic.gradients.reduction import Compressor


@dataclass(frozen=True)
class ExchangeOptions:
    """How gradients are exchanged; the same on all ranks."""

    bucket_bytes: int = BUCKET_BYTES  # about so many in each bucket: see `build_buckets`
    groups: tuple[
        tuple[int, ...], ...
    ] = ()  # numbers of parameters that travel together: see `build_buckets`
    average: bool = False  # divide by the size of the group
    predivide: float = 1.0  # divide by this much before the sum, and by the rest after it
    wire: str | None = None  # the engine's format of float32; None: as it is
    # A compressor of the user's, called on the host for each gradient that has all its rows.
    compressor: type[Compressor] | None = None
    # Sparse gradients are "refused", exchanged as "dense" ones, or as "sparse" ones from the second step of a world on.
    sparse: str = "refused"
    # Virtual shares of a step, whose gradients are added in the order of `share_tree`; 0: gradients are summed by rank.
    shares: int = 0
    arithmetic: str = ""  # what their bits depend on besides, in words; the same on all ranks
    warn_after: float = math.inf  # seconds; see `stall.watch_collective`
    wait_at_most: float | None = None  # seconds; see `stall.watch_collective`
    bulk_backend: str = "host"  # what sums gradients on GPUs: see `OperationConfig`
    hybrid_recovery: bool = True  # see `OperationConfig`

    def factors(self, size: int) -> tuple[float, float]:
        """Return the factors (before, after) the sum."""
        return 1.0 / self.predivide, self.predivide / (size if self.average else 1.0)

    @property
    def description(self) -> str:
        """What all ranks must have in common, in words."""
        parts = ["averaged" if self.average else "summed"]
        if self.predivide != 1.0:
            parts.append(f"divided by {self.predivide!r} before")
        if self.wire is not None:
            parts.append(f"sent as {self.wire}")
        if self.compressor is not None:
            parts.append(f"compressed by {self.compressor.__qualname__}")
        if self.shares:
            parts.append(f"of {self.shares} virtual shares, computed with {self.arithmetic}")
        return ", ".join([*parts, f"sparse gradients: {self.sparse}"])


DEFAULT_OPTIONS = ExchangeOptions()  # gradients are summed as they are


def options_from_env(**others: Any) -> ExchangeOptions:
    """Return options with the bucket size, the stall check and the bulk plane of this process's settings."""
    config = operations_from_env()
    return ExchangeOptions(
        bucket_bytes=config.bucket_bytes,
        warn_after=config.warn_after,
        wait_at_most=config.wait_at_most,
        bulk_backend=config.bulk_backend,
        hybrid_recovery=config.hybrid_recovery,
        **others,
    )
