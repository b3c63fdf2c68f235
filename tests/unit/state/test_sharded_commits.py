"""How state is divided over the ranks, where copies lie, and which commit is restored; a flipped bit is noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from elastic_collectives import CollectiveError, Group
from spark_elastic.handwritten.sharded_commits import (
    LAYOUT,
    CommitKey,
    DividedTensor,
    LostCommit,
    Place,
    RestorableCommit,
    ShardedCommits,
    assign_copies,
    choose_commit,
    find_overlaps,
    get_shard_range,
    lay_out,
)
from spark_elastic.protocol.types import START
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder
from tests.fake_group import FakeFabric

ROWS = 7  # of a tensor with one float64 in each


def make_rows(rank: int, size: int) -> Bytes:
    return np.arange(*get_shard_range(ROWS, size, rank), dtype=np.float64).view(np.uint8)


class Ranks:
    """The commits of each rank, and the world that they are in, each on a host of its own."""

    def __init__(self, size: int) -> None:
        self.commits = [ShardedCommits() for _ in range(size)]

    def begin_world(self) -> RestorableCommit | LostCommit | None:
        self.fabric = FakeFabric(len(self.commits))

        def agree(rank: int, group: Group) -> Any:
            commits = self.commits[rank]
            return commits.agree_on_commit(group, Place("machine", f"host {id(commits)}"))

        first, *others = self.run(agree)
        assert all(type(other) is type(first) for other in others)
        return first  # type: ignore[no-any-return]

    def save(self) -> list[None]:
        def save(rank: int, group: Group) -> None:
            def capture(builder: Any) -> dict[str, Any]:
                builder.add_piece(DividedTensor(ROWS, 8), make_rows(rank, group.size))
                return {}

            self.commits[rank].save(group, START, (1, 1), capture)

        return self.run(save)

    def divide(self, chosen: RestorableCommit) -> list[list[Bytes]]:
        common: Any = SimpleNamespace(values={LAYOUT: [(ROWS, 8)]})
        return self.run(lambda rank, group: self.commits[rank].divide(group, chosen, common))

    def run(self, work: Callable[[int, Group], Any]) -> list[Any]:
        """`work(rank, group)` on all ranks."""
        with ThreadPoolExecutor(len(self.commits)) as pool:
            calls = [pool.submit(work, rank, group) for rank, group in enumerate(self.fabric.groups)]
            return [call.result() for call in calls]

    def flip_bit_on_arrival(self, rank: int) -> None:
        """In the first bytes that this rank of the world receives by an all-to-all."""
        group = self.fabric.group(rank)
        alltoall = group.alltoall

        def receive(*given: Any, **named: Any) -> Any:
            received, counts = alltoall(*given, **named)
            if received.dtype == np.uint8:
                received[len(received) // 2] ^= 0x80
            return received, counts

        group.alltoall = receive  # type: ignore[method-assign]


def start_saved(size: int) -> Ranks:
    """In a world, with one commit."""
    ranks = Ranks(size)
    ranks.begin_world()
    ranks.save()
    return ranks


def flip_bit(commits: ShardedCommits, shard: int) -> None:
    memory = commits._held[0].shards[shard]
    memory[3] ^= 1


def test_a_copy_that_was_damaged_on_its_way_breaks_the_world_and_the_commit_before_stays() -> None:
    ranks = start_saved(3)
    ranks.flip_bit_on_arrival(1)
    said = "the copy of rank 0's shard that rank 1 received is not the one"
    with pytest.raises(CollectiveError, match=said):
        ranks.save()
    assert isinstance(ranks.begin_world(), RestorableCommit)


@pytest.mark.parametrize("holder", [0, 1])
def test_a_shard_that_was_damaged_in_memory_comes_from_the_other_rank_that_holds_it(
    holder: int, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = start_saved(3)
    flip_bit(ranks.commits[holder], 0)  # rank 0 made it, rank 1 has the copy
    chosen = ranks.begin_world()
    assert isinstance(chosen, RestorableCommit)
    assert chosen.senders[0] == 1 - holder
    assert "shard 0 of commit 0 is damaged in this worker's memory" in caplog.text
    for rank, pieces in enumerate(ranks.divide(chosen)):
        np.testing.assert_array_equal(pieces[0], make_rows(rank, 3))


def test_a_shard_whose_only_holder_is_damaged_is_lost() -> None:
    ranks = start_saved(3)
    flip_bit(ranks.commits[1], 0)
    del ranks.commits[0]
    assert not isinstance(ranks.begin_world(), RestorableCommit)


def test_what_is_damaged_while_it_is_divided_anew_breaks_the_world() -> None:
    ranks = start_saved(3)
    del ranks.commits[2]
    chosen = ranks.begin_world()
    assert isinstance(chosen, RestorableCommit)
    ranks.flip_bit_on_arrival(0)
    said = "part of a commit from rank . that rank 0 received is not the one"
    with pytest.raises(CollectiveError, match=said):
        ranks.divide(chosen)


def test_a_damaged_checkpoint_in_memory_is_not_used() -> None:
    ranks = start_saved(1)
    whole = ranks.commits[0].gather(ranks.fabric.group(0), 0)
    assert whole is not None
    ranks.commits[0].adopt(whole)
    assert isinstance(ranks.begin_world(), RestorableCommit)
    flip_bit(ranks.commits[0], 0)
    assert not isinstance(ranks.begin_world(), RestorableCommit)


def test_what_lies_on_another_device_is_part_of_a_commit() -> None:
    def capture(builder: SnapshotBuilder) -> dict[str, Any]:
        return {"weights": builder.add_remote(3, lambda memory: memory.fill(7))}

    commit = ShardedCommits().copy_state(0, CommitKey(1, (1, 1), 1), START, capture)
    assert commit.common.values["weights"].of(commit.common.memory).tolist() == [7, 7, 7]


# ---- arithmetic

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
    assert isinstance(chosen, RestorableCommit)
    assert (chosen.key, chosen.senders[1:]) == (OLD, (1, 0))
    held[0] = [(OLD, [0, 2]), (NEW, [0, 2])]
    chosen = choose_commit(held)
    assert isinstance(chosen, RestorableCommit)
    assert chosen.key == NEW


AGAIN = CommitKey(8, (1, 3), 1)


@pytest.mark.parametrize(
    ("held", "chosen"),
    [
        pytest.param(
            [[(NEW, [0, 1, 2])], [(AGAIN, [0])], []],
            RestorableCommit(AGAIN, (1,)),
            id="divided anew: the newer one",
        ),
        pytest.param([[(NEW, [0])], []], LostCommit(NEW, (1, 2)), id="gone with their copies"),
        pytest.param([[], []], None, id="no commit"),
        pytest.param([[(CommitKey(0, (1, 1), 2), [0])], []], None, id="before the first one"),
    ],
)
def test_the_commit_to_restore_follows_from_what_is_held(
    held: list[list[tuple[CommitKey, list[int]]]], chosen: RestorableCommit | LostCommit | None
) -> None:
    assert choose_commit(held) == chosen
