"""A flipped bit in a shard, in a copy of it, or in what is divided anew, is noticed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from elastic_collectives import CollectiveError, Group
from spark_elastic.handwritten.sharded_commits import ShardedCommits
from spark_elastic.handwritten.shards import (
    CommitKey,
    DividedTensor,
    LostCommit,
    Place,
    RestorableCommit,
    get_shard_range,
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

    def begin_world(self) -> list[RestorableCommit | LostCommit | None]:
        self.fabric = FakeFabric(len(self.commits))
        return self.run(
            lambda rank, group: self.commits[rank].agree_on_commit(
                group, Place("machine", f"host {id(self.commits[rank])}")
            )
        )

    def save(self) -> list[None]:
        def save(rank: int, group: Group) -> None:
            def capture(builder: Any) -> dict[str, Any]:
                builder.add_piece(DividedTensor(ROWS, 8), make_rows(rank, group.size))
                return {}

            self.commits[rank].save(group, START, (1, 1), capture)

        return self.run(save)

    def divide(self, chosen: RestorableCommit) -> list[list[Bytes]]:
        return self.run(
            lambda rank, group: self.commits[rank].divide(group, chosen, [DividedTensor(ROWS, 8)])
        )

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
    with pytest.raises(
        CollectiveError, match="the copy of rank 0's shard that rank 1 received is not the one"
    ):
        ranks.save()
    assert all(isinstance(found, RestorableCommit) for found in ranks.begin_world())


@pytest.mark.parametrize("holder", [0, 1])
def test_a_shard_that_was_damaged_in_memory_comes_from_the_other_rank_that_holds_it(
    holder: int, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = start_saved(3)
    flip_bit(ranks.commits[holder], 0)  # rank 0 made it, rank 1 has the copy
    (chosen, *_) = ranks.begin_world()
    assert isinstance(chosen, RestorableCommit)
    assert chosen.senders[0] == 1 - holder
    assert "shard 0 of commit 0 is damaged in this worker's memory" in caplog.text
    for rank, pieces in enumerate(ranks.divide(chosen)):
        np.testing.assert_array_equal(pieces[0], make_rows(rank, 3))


def test_a_shard_whose_only_holder_is_damaged_is_lost() -> None:
    ranks = start_saved(3)
    flip_bit(ranks.commits[1], 0)
    del ranks.commits[0]
    assert not any(isinstance(found, RestorableCommit) for found in ranks.begin_world())


def test_what_is_damaged_while_it_is_divided_anew_breaks_the_world() -> None:
    ranks = start_saved(3)
    del ranks.commits[2]
    (chosen, *_) = ranks.begin_world()
    assert isinstance(chosen, RestorableCommit)
    ranks.flip_bit_on_arrival(0)
    with pytest.raises(
        CollectiveError, match=r"part of a commit from rank . that rank 0 received is not the one"
    ):
        ranks.divide(chosen)


def test_a_damaged_checkpoint_in_memory_is_not_used() -> None:
    ranks = start_saved(1)
    whole = ranks.commits[0].gather(ranks.fabric.group(0), 0)
    assert whole is not None
    ranks.commits[0].adopt(whole)
    (chosen,) = ranks.begin_world()
    assert isinstance(chosen, RestorableCommit)
    flip_bit(ranks.commits[0], 0)
    (found,) = ranks.begin_world()
    assert not isinstance(found, RestorableCommit)


def test_what_lies_on_another_device_is_part_of_a_commit() -> None:
    def capture(builder: SnapshotBuilder) -> dict[str, Any]:
        return {"weights": builder.add_remote(3, lambda memory: memory.fill(7))}

    commit = ShardedCommits().copy_state(0, CommitKey(1, (1, 1), 1), START, capture)
    assert commit.common.values["weights"].of(commit.common.memory).tolist() == [7, 7, 7]
