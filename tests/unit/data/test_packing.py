"""Rows of different lengths, and documents in sequences: each token once, padding, what the order depends on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spark_elastic.data.packing import (
    IGNORED,
    LEAST_SEQUENCES,
    Packing,
    Ragged,
    check_lengths,
    cumulate_lengths,
    cut_windows,
    find_positions,
    make_labels,
    pack_groups,
    pack_window,
)
from spark_elastic.errors import InvalidInput

Int64s = np.ndarray


def draw_lengths(seed: int, count: int, mean: float, most: int) -> Int64s:
    """Lengths of real text: log-normal."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(mean) - 0.5, 1.0, count).astype(np.int64)
    return np.minimum(most, drawn)


def number_tokens(lengths: Int64s) -> Ragged:
    """Documents whose tokens are 1, 2, ... over all of them."""
    ends = np.cumsum(lengths)
    return Ragged(np.arange(1, ends[-1] + 1), np.concatenate([[0], ends]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("overlong", ["refuse", "split", "truncate"])
def test_each_token_is_packed_once_and_in_its_document(seed: int, overlong: str) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 50))
    lengths = rng.integers(0, length + 1 if overlong == "refuse" else 4 * length, int(rng.integers(1, 300)))
    lengths[0] = 1
    packing = Packing(length=length, overlong=overlong)
    documents = number_tokens(lengths)
    window = pack_window(lengths, packing)
    tokens, ids = window.fill(documents, length, 0), window.number_documents(length)
    assert tokens.shape == ids.shape == (window.count, length)
    assert ((ids == 0) == (tokens == 0)).all()
    kept = np.concatenate([row[:length] if overlong == "truncate" else row for row in documents])
    assert np.array_equal(np.sort(tokens[tokens > 0]), kept)
    found = []
    for row, own in zip(tokens, ids, strict=True):
        assert (np.diff(own[own > 0]) >= 0).all()
        assert not own[np.count_nonzero(own) :].any(), "padding is at the end"
        for number in range(1, own.max() + 1):
            piece = row[own == number]
            assert np.array_equal(piece, np.arange(piece[0], piece[0] + len(piece)))
            found.append(len(piece))
    parts = [min(length, size - start) for size in lengths for start in range(0, size, length)]
    whole = [min(length, size) for size in lengths if size]
    assert sorted(found) == sorted(parts if overlong == "split" else whole)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("length", "most"), [(2048, 0.02), (512, 0.02), (32768, 0.03)])
def test_real_text_needs_little_padding(seed: int, length: int, most: float) -> None:
    lengths = draw_lengths(seed, 6000, length / 5, length)
    groups = np.split(lengths, 60)  # of rows that are a fifth of a window
    cuts, sequences = pack_groups(groups, Packing(length=length))
    assert len(cuts) > 3
    assert min(sequences) >= LEAST_SEQUENCES
    padding = 1 - lengths.sum() / (sum(sequences) * length)
    assert padding < most
    assert padding <= 0.03, "of what is promised"


def test_a_small_rest_goes_to_the_window_before() -> None:
    assert cut_windows(np.array([128 * 64] * 3 + [10, 10]), 64) == (0, 1, 2, 5)
    assert cut_windows(np.array([128 * 64] * 3 + [64 * 64, 10]), 64) == (0, 1, 2, 3, 5)
    assert cut_windows(np.array([10, 0]), 64) == (0, 2)
    assert cut_windows(np.array([128 * 64, 0]), 64) == (0, 2)


def test_longer_documents_are_refused_or_counted() -> None:
    lengths = np.array([3, 9, 0, 12])
    with pytest.raises(InvalidInput, match="has 2 documents of more than 8 tokens, the longest of 12: raise"):
        check_lengths(lengths, Packing(length=8))
    assert check_lengths(lengths, Packing(length=8, overlong="split")) == 2
    with pytest.raises(InvalidInput, match="have no tokens"):
        check_lengths(np.zeros(3, np.int64), Packing())
    with pytest.raises(InvalidInput, match="overlong must be one of 'refuse', 'split', 'truncate'; got"):
        Packing(overlong="cut")


def test_positions_labels_and_cu_seqlens_follow_from_the_documents() -> None:
    ids = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
    tokens = np.arange(10, 22, dtype=np.int32).reshape(2, 6)
    assert find_positions(ids).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    no = IGNORED
    assert make_labels(tokens, ids).tolist() == [[no, 11, no, 13, 14, no], [no, 17, 18, 19, 20, 21]]
    labels = make_labels(tokens, ids, predict_first=True)
    assert labels.tolist() == [[10, 11, 12, 13, 14, no], [*range(16, 22)]]
    assert cumulate_lengths(ids).tolist() == [0, 2, 5, 6, 12]


ROWS = [np.array(row, np.int32) for row in ([1, 2, 3], [], [4], [5, 6])]


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
