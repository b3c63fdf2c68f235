"""Finds the quickest bucket size: sizes are tried in a world's first steps and timed by rank 0's clock."""

from __future__ import annotations

import statistics

from spark_elastic.torch.gradients.buckets import BUCKET_BYTES

CANDIDATES = (BUCKET_BYTES, 8 << 20, 64 << 20)
STEPS = 5  # of each; the first has new memory and is not counted
MARGIN = 0.97  # of the default's time: what another one must reach to be taken


class Tuner:
    """`wish` is the size for the next step. total: bytes of all gradients; sizes above it are not tried."""

    def __init__(self, total: int) -> None:
        self._left = [size for size in CANDIDATES if size < total] if total > min(CANDIDATES) else []
        self._times: dict[int, list[float]] = {}
        self.wish = self._left[0] if self._left else BUCKET_BYTES

    def took(self, seconds: float) -> None:
        """A step with the wished size, from the beginning of its first pass to the end of its exchange."""
        if not self._left:
            return
        times = self._times.setdefault(self.wish, [])
        times.append(seconds)
        if len(times) < STEPS:
            return
        del self._left[0]
        self.wish = self._left[0] if self._left else self._quickest()

    def _quickest(self) -> int:
        medians = {size: statistics.median(times[1:]) for size, times in self._times.items()}
        best = min(medians, key=medians.__getitem__)
        first = next(iter(medians))
        return best if medians[best] < MARGIN * medians[first] else first
