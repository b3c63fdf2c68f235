"""Bucket sizes tried in turn, and the quickest kept."""

from __future__ import annotations

import pytest

from spark_elastic.torch.gradients.buckets import BUCKET_BYTES
from spark_elastic.torch.gradients.exchange import CANDIDATES, STEPS, Tuner

MB = 1 << 20


def tried(tuner: Tuner, seconds: dict[int, float]) -> list[int]:
    """The wishes until they stay; the first step with each takes long."""
    seen: list[int] = []
    for _ in range(2 * STEPS * len(CANDIDATES)):
        first = tuner.wish not in seen
        seen.append(tuner.wish)
        tuner.took(10.0 if first else seconds[tuner.wish])
    return seen


@pytest.mark.parametrize(
    ("quick", "kept"), [({}, BUCKET_BYTES), ({64 * MB: 0.9}, 64 * MB), ({8 * MB: 0.99}, BUCKET_BYTES)]
)
def test_the_quickest_is_kept_where_it_is_clearly_quicker(quick: dict[int, float], kept: int) -> None:
    tuner = Tuner(200 * MB)
    seen = tried(tuner, {size: quick.get(size, 1.0) for size in CANDIDATES})
    assert seen[: STEPS * len(CANDIDATES)] == [size for size in CANDIDATES for _ in range(STEPS)]
    assert set(seen[STEPS * len(CANDIDATES) :]) == {kept}


@pytest.mark.parametrize(("total", "sizes"), [(MB, {BUCKET_BYTES}), (40 * MB, {BUCKET_BYTES, 8 * MB})])
def test_only_sizes_that_make_a_difference_are_tried(total: int, sizes: set[int]) -> None:
    assert set(tried(Tuner(total), dict.fromkeys(CANDIDATES, 1.0))) == sizes
