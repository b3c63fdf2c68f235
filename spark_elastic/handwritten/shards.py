"""The arithmetic of state that is divided over the ranks: boundaries, where copies lie, which commit can be restored.

Tensors are divided by rows as `torch.chunk` divides them: equal parts, of which the last ones may be short or empty.
Each rank's shard is one flat memory, its pieces of all tensors one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_elastic.runs.snapshot import Extent, align


def get_shard_range(rows: int, size: int, rank: int) -> tuple[int, int]:
    """The first row of that rank's part, and the row after its last one."""
    part = -(-rows // size)
    return min(rank * part, rows), min((rank + 1) * part, rows)


class DividedTensor(NamedTuple):
    """A tensor whose rows are divided over the ranks."""

    rows: int  # of all ranks together
    row_bytes: int  # bytes of a row

    def count_piece_bytes(self, size: int, rank: int) -> int:
        """The bytes of a rank's rows."""
        begin, end = get_shard_range(self.rows, size, rank)
        return (end - begin) * self.row_bytes


def lay_out(tensors: Sequence[DividedTensor], size: int, rank: int) -> tuple[list[Extent], int]:
    """(where each tensor's piece lies in a rank's shard, bytes of the shard)."""
    extents, offset = [], 0
    for tensor in tensors:
        extents.append(Extent(offset, tensor.count_piece_bytes(size, rank)))
        offset += align(extents[-1].nbytes)
    return extents, offset


def find_overlaps(rows: int, old_size: int, new_size: int, new_rank: int) -> Iterator[tuple[int, int, int]]:
    """The rows of a new part, by the old parts that hold them: (old rank, first row, row after the last)."""
    begin, end = get_shard_range(rows, new_size, new_rank)
    part = -(-rows // old_size)
    while begin < end:
        old = begin // part
        until = min(end, (old + 1) * part)
        yield old, begin, until
        begin = until


# ---- where copies lie


class Place(NamedTuple):
    """Where a rank runs."""

    machine: str  # the address at which peers reach its workers
    host: str  # the executor


def assign_copies(places: Sequence[Place]) -> list[int]:
    """For each rank the rank that holds the copy of its shard; itself in a world of one.

    The copy lies on another machine if there are several, else on another host if there are several. Of the ranks
    there, one with the fewest copies takes it, the next one behind the owner if there are several of those.
    """
    size = len(places)
    counts = [0] * size
    found = []
    for rank, place in enumerate(places):
        others = [(rank + step) % size for step in range(1, size)]
        machines = [other for other in others if places[other].machine != place.machine]
        hosts = [other for other in others if places[other].host != place.host]
        chosen = min(machines or hosts or others or [rank], key=lambda other: counts[other])
        counts[chosen] += 1
        found.append(chosen)
    return found


# ---- which commit can be restored


class CommitKey(NamedTuple):
    """Names a commit; of two keys the higher one is the newer commit. The members of a new world commit the same state
    again, divided anew."""

    number: int  # commits so far, as `Position.step` counts them; 0: the initial state
    # (attempt, generation) of the world that made it; (0, 0): it was read from a checkpoint.
    fence: tuple[int, int]
    size: int  # how many ranks its state is divided over


@dataclass(frozen=True)
class RestorableCommit:
    """A commit of which each shard is there."""

    key: CommitKey  # the newest that is whole
    senders: tuple[int, ...]  # for each of its shards the rank of the present world that sends it


@dataclass(frozen=True)
class LostCommit:
    """A commit of which shards are gone, with all of their copies."""

    key: CommitKey  # the newest that is known
    shards: tuple[int, ...]  # the numbers of those shards


Holdings = Sequence[tuple[CommitKey, Sequence[int]]]


def choose_commit(holdings: Sequence[Holdings]) -> RestorableCommit | None:
    """The newest commit that can be restored; None: there is none.

    Args:
        holdings: of each rank, what it holds: commits, and of each the numbers of the shards.
    """
    holders = _find_holders(holdings)
    for key in sorted(holders, reverse=True):
        if len(holders[key]) < key.size:
            continue
        counts = [0] * len(holdings)
        senders = []
        for shard in range(key.size):
            sender = min(holders[key][shard], key=lambda rank: counts[rank])
            counts[sender] += 1
            senders.append(sender)
        return RestorableCommit(key, tuple(senders))
    return None


def find_lost_commit(holdings: Sequence[Holdings]) -> LostCommit | None:
    """The newest commit that a rank knows of, where none can be restored; None: nothing was committed yet."""
    holders = _find_holders(holdings)
    newest = max(holders, default=None)
    if newest is None or newest.number == 0:
        return None
    return LostCommit(newest, tuple(shard for shard in range(newest.size) if shard not in holders[newest]))


def _find_holders(holdings: Sequence[Holdings]) -> dict[CommitKey, dict[int, list[int]]]:
    """For each commit, and each of its shards that is left, the ranks that hold it."""
    holders: dict[CommitKey, dict[int, list[int]]] = {}
    for rank, held in enumerate(holdings):
        for key, shards in held:
            of_commit = holders.setdefault(key, {})
            for shard in shards:
                of_commit.setdefault(shard, []).append(rank)
    return holders
