"""Random numbers of rows: of the row, the epoch and the seed, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.training.transformation import RowRandom

ROWS = np.arange(5000)


def _draw(rng: RowRandom) -> list[np.ndarray]:
    return [
        rng.uniform(-1.0, 3.0, size=2),
        rng.integers(-4, 5),
        rng.normal(2.0, 0.5, size=(1, 3)),
        rng.seeds(),
    ]


def test_a_row_draws_the_same_beside_whatever_others() -> None:
    whole = _draw(RowRandom(7, 1, ROWS))
    some = np.array([4000, 3, 77])
    for all_rows, few in zip(whole, _draw(RowRandom(7, 1, some)), strict=True):
        np.testing.assert_array_equal(all_rows[some], few)


@pytest.mark.parametrize(("seed", "epoch"), [(8, 1), (7, 2)])
def test_another_seed_and_another_epoch_draw_other_numbers(seed: int, epoch: int) -> None:
    for ours, theirs in zip(_draw(RowRandom(7, 1, ROWS)), _draw(RowRandom(seed, epoch, ROWS)), strict=True):
        assert abs(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1]) < 0.05


def test_two_calls_and_two_rows_draw_independently() -> None:
    rng = RowRandom(7, 1, ROWS)
    first, second = rng.uniform(), rng.uniform()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


def test_numbers_have_the_distribution_of_their_name() -> None:
    rng = RowRandom(7, 1, ROWS)
    assert len(rng) == len(ROWS)
    even = rng.uniform(2.0, 4.0)
    assert even.shape == (5000,)
    assert 2.0 <= even.min() < 2.01
    assert 3.99 < even.max() < 4.0
    whole = rng.integers(-1, 2, size=3)
    assert whole.shape == (5000, 3)
    assert np.bincount(whole.ravel() + 1, minlength=3).min() > 4700
    bell = rng.normal(2.0, 0.5, size=(2, 2))
    assert bell.shape == (5000, 2, 2)
    assert abs(bell.mean() - 2.0) < 0.02
    assert abs(bell.std() - 0.5) < 0.02
    assert len(set(rng.seeds().tolist())) == 5000
    with pytest.raises(InvalidInput, match=r"rng.integers\(3, 3\) has nothing to draw from"):
        rng.integers(3, 3)
