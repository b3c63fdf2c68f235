"""How state is divided over the ranks, where copies lie, and which commit is restored."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from spark_elastic.handwritten.shards import (
    CommitKey,
    DividedTensor,
    LostCommit,
    Place,
    assign_copies,
    choose_commit,
    find_lost_commit,
    find_overlaps,
    get_shard_range,
    lay_out,
)

rows, sizes = st.integers(0, 40), st.integers(1, 9)


@given(rows, sizes)
def test_shards_are_divided_as_by_torch(rows: int, size: int) -> None:
    parts = torch.arange(rows).chunk(size) if rows else ()
    for rank in range(size):
        begin, end = get_shard_range(rows, size, rank)
        assert list(range(begin, end)) == (parts[rank].tolist() if rank < len(parts) else [])
        length, offset = Shard(0).local_shard_size_and_offset(rows, size, rank)
        assert (end - begin, begin) == (length, offset)


@given(rows, sizes, sizes)
def test_each_row_of_a_new_part_comes_from_the_old_part_that_has_it(rows: int, old: int, new: int) -> None:
    for rank in range(new):
        found = [
            (part, row)
            for part, first, last in find_overlaps(rows, old, new, rank)
            for row in range(first, last)
        ]
        assert [row for _, row in found] == list(range(*get_shard_range(rows, new, rank)))
        assert all(
            get_shard_range(rows, old, part)[0] <= row < get_shard_range(rows, old, part)[1]
            for part, row in found
        )


def test_pieces_of_a_shard_are_aligned_and_may_be_empty() -> None:
    tensors = [DividedTensor(5, 8), DividedTensor(1, 4), DividedTensor(0, 8)]
    extents, nbytes = lay_out(tensors, 4, 0)
    assert [tuple(extent) for extent in extents] == [(0, 16), (64, 4), (128, 0)]
    assert nbytes == 128
    assert lay_out(tensors, 4, 3) == ([(0, 0)] * 3, 0)


places = st.lists(st.integers(0, 5), min_size=1, max_size=12).map(
    lambda hosts: [Place(f"m{host // 2}", f"h{host}") for host in hosts]
)


@given(places)
def test_a_copy_lies_on_another_machine_else_another_host_else_another_rank(places: list[Place]) -> None:
    for rank, target in enumerate(assign_copies(places)):
        mine, there = places[rank], places[target]
        if len({place.machine for place in places}) > 1:
            assert mine.machine != there.machine
        elif len({place.host for place in places}) > 1:
            assert mine.host != there.host
        else:
            assert rank != target or len(places) == 1


@given(st.integers(2, 6), st.integers(1, 4))
def test_on_equal_hosts_each_rank_keeps_one_copy(hosts: int, workers: int) -> None:
    places = [Place(f"m{host}", f"h{host}") for host in range(hosts) for _ in range(workers)]
    assert set(Counter(assign_copies(places)).values()) == {1}


OLD, NEW = CommitKey(7, (1, 2), 3), CommitKey(8, (1, 2), 3)


def test_the_newest_commit_of_which_each_shard_is_left_is_restored() -> None:
    held = [[(OLD, [0, 2]), (NEW, [0])], [(OLD, [1, 0]), (NEW, [1, 0])]]
    chosen = choose_commit(held)  # the copy of shard 2 of the newer one never arrived
    assert chosen is not None
    assert (chosen.key, chosen.senders[1:]) == (OLD, (1, 0))
    held[0] = [(OLD, [0, 2]), (NEW, [0, 2])]
    chosen = choose_commit(held)
    assert chosen is not None
    assert chosen.key == NEW


def test_the_same_commit_divided_anew_is_the_newer_one() -> None:
    again = CommitKey(8, (1, 3), 1)
    chosen = choose_commit([[(NEW, [0, 1, 2])], [(again, [0])], []])
    assert chosen is not None
    assert (chosen.key, chosen.senders) == (again, (1,))


def test_shards_that_are_gone_with_their_copies_are_named() -> None:
    held = [[(NEW, [0])], []]
    assert choose_commit(held) is None
    assert find_lost_commit(held) == LostCommit(NEW, (1, 2))


@pytest.mark.parametrize("held", [[[], []], [[(CommitKey(0, (1, 1), 2), [0])], []]])
def test_before_the_first_commit_nothing_is_lost(held: list[list[tuple[CommitKey, list[int]]]]) -> None:
    assert choose_commit(held) is None
    assert find_lost_commit(held) is None
