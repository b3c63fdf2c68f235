"""Rows of different lengths: padding, rows of a batch, and tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spark_elastic.data.packing import Ragged
from spark_elastic.errors import InvalidInput

ROWS = [
    np.array([1, 2, 3], np.int32),
    np.array([], np.int32),
    np.array([4], np.int32),
    np.array([5, 6], np.int32),
]


def as_lists(ragged: Ragged) -> list[list[int]]:
    return [row.tolist() for row in ragged]


@pytest.mark.parametrize("torch_side", [False, True])
def test_rows_are_padded_chosen_and_put_together(torch_side: bool) -> None:
    ragged = Ragged.of(ROWS)
    ragged = ragged.tensors() if torch_side else ragged
    assert isinstance(ragged.values, torch.Tensor if torch_side else np.ndarray)
    assert (len(ragged), ragged.lengths.tolist()) == (4, [3, 0, 1, 2])
    padded = ragged.pad(-1)
    assert isinstance(padded, type(ragged.values))
    assert str(padded.dtype).endswith("int32")
    assert padded.tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1], [5, 6, -1]]
    assert ragged.pad(0, to=4)[0].tolist() == [1, 2, 3, 0]
    with pytest.raises(InvalidInput, match="A row has 3 values, and pad was asked for 2"):
        ragged.pad(0, to=2)
    assert ragged[-1].tolist() == [5, 6]
    for part, expected in ((ragged[1:3], [[], [4]]), (ragged[3:1], []), (ragged[::2], [[1, 2, 3], [4]])):
        assert as_lists(part) == expected
        assert isinstance(part.values, type(ragged.values))
    assert as_lists(ragged[np.array([3, 3, 1])]) == [[5, 6], [5, 6], []]
    both = Ragged.concatenate([ragged[2:], ragged[:1]])
    assert as_lists(both) == [[4], [5, 6], [1, 2, 3]]
    assert both.pad(0).tolist() == [[4, 0, 0], [5, 6, 0], [1, 2, 3]]


def test_max_length_cuts_rows_and_counts_them() -> None:
    cut = Ragged.of(ROWS, max_length=1)
    assert (as_lists(cut), cut.truncated) == ([[1], [], [4], [5]], 2)
    assert Ragged.concatenate([cut, cut]).truncated == 4
    again = Ragged.of(ROWS).tensors().truncate(1)
    assert (as_lists(again), again.truncated, again.values.dtype) == (as_lists(cut), 2, torch.int32)
    assert Ragged.of(ROWS, max_length=3).truncated == 0


def test_a_batch_without_values_has_rows() -> None:
    empty = Ragged.of([np.array([], np.int64)] * 2)
    assert (empty.pad(0).shape, empty.values.dtype) == ((2, 0), np.int64)
    assert Ragged.of([]).pad(0, to=3).shape == (0, 3)
    assert Ragged.of([], dtype="int16").values.dtype == np.int16
    assert as_lists(Ragged.of(np.arange(4).reshape(2, 2))) == [[0, 1], [2, 3]]  # of one length, as decoded
    with pytest.raises(InvalidInput, match="1-D arrays"):
        Ragged.of([np.zeros((2, 2))])


def test_strings_and_dates_stay_arrays() -> None:
    for rows in ([np.array(["a", "b"], object), np.array([], object)], [np.array(["2024-05-06"], "M8[D]")]):
        ragged = Ragged.of(rows).tensors()
        assert isinstance(ragged.values, np.ndarray)
        assert as_lists(ragged) == [row.tolist() for row in rows]
