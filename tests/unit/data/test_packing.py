"""Documents in sequences: each token once, padding, and what the order of a window depends on."""

from __future__ import annotations

import numpy as np
import pytest

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
    with pytest.raises(
        InvalidInput, match="overlong must be one of 'refuse', 'split', 'truncate'; got 'cut'"
    ):
        Packing(overlong="cut")


def test_positions_labels_and_cu_seqlens_follow_from_the_documents() -> None:
    ids = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
    tokens = np.arange(10, 22, dtype=np.int32).reshape(2, 6)
    assert find_positions(ids).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    no = IGNORED
    assert make_labels(tokens, ids).tolist() == [[no, 11, no, 13, 14, no], [no, 17, 18, 19, 20, 21]]
    assert make_labels(tokens, ids, predict_first=True).tolist() == [
        [10, 11, 12, 13, 14, no],
        [*range(16, 22)],
    ]
    assert cumulate_lengths(ids).tolist() == [0, 2, 5, 6, 12]
