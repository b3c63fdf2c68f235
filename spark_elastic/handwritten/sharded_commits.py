"""Commits of a state that is divided over the ranks: each rank keeps its shard, and another host keeps a copy of it.

A commit is complete once each shard has its copy; only then does a rank drop the commit before it. After a loss the
ranks tell each other what they hold, restore the newest commit of which every shard is left, and divide it anew among
themselves in memory. What all ranks have alike (plain values, buffers, settings) is a `Snapshot` that each rank keeps.
Shards have checksums: of what arrives from another rank, and, before a commit is restored, of what lies in memory.
Tensors are divided by rows as `torch.chunk` divides them; a shard is one memory, its pieces one after the other.

Knows no framework. Training thread only; every method with a group is collective.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from elastic_collectives import CollectiveError, Group
from elastic_collectives.operands import split
from spark_elastic.protocol.types import Position
from spark_elastic.runs.snapshot import (
    Bytes,
    Capture,
    Extent,
    PickleCodec,
    Snapshot,
    SnapshotBuilder,
    align,
    broadcast_snapshot,
    build_snapshot,
)

log = logging.getLogger("spark_elastic.state")

BATCH_BYTES = 64 << 20  # of tensors that are divided anew in one exchange, so that it needs little memory
FROM_CHECKPOINT = (0, 0)  # the fence of a commit that was read from a checkpoint
LAYOUT = ".tensors"  # key of the divided tensors in a commit's values; no value of a state has such a name


# ---- arithmetic: pure


def get_shard_range(rows: int, size: int, rank: int) -> tuple[int, int]:
    """The first row of that rank's part, and the row after its last one."""
    part = -(-rows // size)
    return min(rank * part, rows), min((rank + 1) * part, rows)


class DividedTensor(NamedTuple):
    rows: int  # of all ranks together
    row_bytes: int  # bytes of a row

    def count_piece_bytes(self, size: int, rank: int) -> int:
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
    fence: tuple[int, int]  # (attempt, generation) of the world that made it, or `FROM_CHECKPOINT`
    size: int  # how many ranks its state is divided over


@dataclass(frozen=True)
class RestorableCommit:
    key: CommitKey  # the newest that is whole
    senders: tuple[int, ...]  # for each of its shards the rank of the present world that sends it


@dataclass(frozen=True)
class LostCommit:
    key: CommitKey  # the newest that is known
    shards: tuple[int, ...]  # the numbers of those shards


Holdings = Sequence[tuple[CommitKey, Sequence[int]]]


def choose_commit(holdings: Sequence[Holdings]) -> RestorableCommit | LostCommit | None:
    """The newest commit that can be restored; if there is none the newest that a rank knows of; None: nothing was
    committed yet. holdings: of each rank, what it holds: commits, and of each the numbers of the shards."""
    holders: dict[CommitKey, dict[int, list[int]]] = {}  # of each commit, and each of its shards that is left
    for rank, held in enumerate(holdings):
        for key, shards in held:
            of_commit = holders.setdefault(key, {})
            for shard in shards:
                of_commit.setdefault(shard, []).append(rank)
    for key in sorted(holders, reverse=True):
        if len(holders[key]) == key.size:
            counts = [0] * len(holdings)
            senders = []
            for shard in range(key.size):
                senders.append(min(holders[key][shard], key=lambda rank: counts[rank]))
                counts[senders[-1]] += 1
            return RestorableCommit(key, tuple(senders))
    newest = max(holders, default=None)
    if newest is None or newest.number == 0:
        return None
    return LostCommit(newest, tuple(shard for shard in range(newest.size) if shard not in holders[newest]))


# ---- commits


class ShardBuilder(SnapshotBuilder):
    """Also collects this rank's pieces of divided tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[DividedTensor] = []
        self.locals: list[Bytes] = []

    def add_piece(self, tensor: DividedTensor, local: Bytes) -> int:
        """Have this rank's part of a tensor copied. Returns the tensor's number."""
        self.tensors.append(tensor)
        self.locals.append(local)
        return len(self.tensors) - 1


@dataclass
class ShardedCommit:
    key: CommitKey  # its size is the number of shards
    common: Snapshot  # what all ranks have alike
    places: Sequence[Place]  # where the ranks of its world ran
    shards: dict[int, Bytes]  # by number: the rank's own shard, and those that it keeps a copy of
    checksums: dict[int, int]  # of these shards, by number, computed by the ranks that made them

    @property
    def tensors(self) -> list[DividedTensor]:
        return list_tensors(self.common)


def list_tensors(common: Snapshot) -> list[DividedTensor]:
    return [DividedTensor(*each) for each in common.values[LAYOUT]]


class ShardedCommits:
    """The commits that this process holds, oldest first: the newest complete one, and one that is being made."""

    def __init__(self) -> None:
        self._held: list[ShardedCommit] = []
        self._places: tuple[Place, ...] = ()

    def get_newest_complete(self) -> ShardedCommit | None:
        """The oldest one that is held: a newer one is still being made."""
        return self._held[0] if self._held else None

    @property
    def memory_bytes(self) -> int:
        """Bytes that the commits' tensors occupy in this process: between two commits, so that a step has the rest."""
        return sum(shard.nbytes for commit in self._held for shard in commit.shards.values())

    def clear(self) -> None:
        self._held = []

    def save(self, group: Group, position: Position, fence: tuple[int, int], capture: Capture) -> None:
        """Make a commit, complete on all ranks when this returns.

        Raises:
            CollectiveError: the group broke; the commit before is still there.
        """
        commit = self.copy_state(group.rank, CommitKey(position.step, fence, group.size), position, capture)
        self._held.append(commit)
        self._exchange_copies(group, commit)
        group.barrier()
        self.keep_only(commit)

    def keep_only(self, commit: ShardedCommit) -> None:
        self._held = [commit]

    def copy_state(self, rank: int, key: CommitKey, position: Position, capture: Capture) -> ShardedCommit:
        """Copy the present state to a commit, which is not held."""
        builder = ShardBuilder()
        common = build_snapshot(position, lambda _: {**capture(builder), LAYOUT: builder.tensors}, builder)
        extents, nbytes = lay_out(builder.tensors, key.size, rank)
        own = np.empty(nbytes, np.uint8)
        for extent, piece in zip(extents, builder.locals, strict=True):
            extent.of(own)[...] = piece
        return ShardedCommit(key, common, self._places, {rank: own}, {rank: _compute_checksum(own)})

    def _exchange_copies(self, group: Group, commit: ShardedCommit) -> None:
        """Send this rank's shard to the rank that keeps its copy, and receive those that this rank keeps."""
        targets = assign_copies(self._places)
        own = commit.shards[group.rank]
        splits = [own.nbytes if to == targets[group.rank] != group.rank else 0 for to in range(group.size)]
        sources = [rank for rank in range(group.size) if targets[rank] == group.rank != rank]
        sizes = [lay_out(commit.tensors, group.size, rank)[1] for rank in sources]
        kept = np.empty(sum(sizes), np.uint8)
        group.alltoall(own if sum(splits) else own[:0], splits, out=kept)
        checksums = group.allgather(np.array(commit.checksums[group.rank], np.uint64)).tolist()
        for rank, copy in zip(sources, split(kept, sizes), strict=True):
            _require_checksum(group, copy, checksums[rank], f"the copy of rank {rank}'s shard")
            commit.shards[rank], commit.checksums[rank] = copy, checksums[rank]

    # ---- at the beginning of a world

    def agree_on_commit(self, group: Group, place: Place) -> RestorableCommit | LostCommit | None:
        """As `choose_commit`, the same on all ranks. place: where this rank runs."""
        self._drop_damaged()
        held = [(commit.key, sorted(commit.shards)) for commit in self._held]
        told = [json.loads(each) for each in group.allgather_bytes(json.dumps([place, held]).encode())]
        self._places = tuple(Place(*each[0]) for each in told)
        holdings = [[(_read_key(key), shards) for key, shards in each[1]] for each in told]
        chosen = choose_commit(holdings)
        if isinstance(chosen, RestorableCommit):  # a newer one cannot be restored: a shard of it is gone
            self._held = [commit for commit in self._held if commit.key <= chosen.key]
        return chosen

    def _drop_damaged(self) -> None:
        """Forget shards of which a bit has changed in this process's memory: another rank may hold them as well."""
        for commit in self._held:
            for shard, memory in list(commit.shards.items()):
                if _compute_checksum(memory) != commit.checksums[shard]:
                    del commit.shards[shard]
                    log.warning(
                        "shard %d of commit %d is damaged in this worker's memory, and is not used: have the memory of "
                        "this machine tested",
                        *(shard, commit.key.number),
                    )

    def gather_loss_description(self, group: Group, lost: LostCommit) -> str:
        """Which parts of the commit are missing, and where they were."""
        mine = self._find(lost.key)
        packed = group.allgather_bytes(json.dumps([] if mine is None else mine.places).encode())
        places = next(([Place(*place) for place in t] for each in packed if (t := json.loads(each))), [])
        parts = [f"shard {shard}" for shard in lost.shards]
        if len(places) == lost.key.size:
            targets = assign_copies(places)
            parts = [
                f"shard {shard}, which rank {shard} on {places[shard].host} held, and its copy on rank "
                f"{targets[shard]} on {places[targets[shard]].host}"
                for shard in lost.shards
            ]
        return "; ".join(parts)

    def share_common(self, group: Group, chosen: RestorableCommit) -> Snapshot:
        """What all ranks have alike in the chosen commit."""
        source = chosen.senders[0]
        mine = self._find(chosen.key)
        sent = mine.common if mine is not None and group.rank == source else None
        common = broadcast_snapshot(group, source, sent, PickleCodec()) or sent
        assert common is not None
        if mine is None:
            # This rank is about to load a commit of which it holds no shard: if all holders die meanwhile, the next
            # world must not take that for a beginning.
            self._held.insert(0, ShardedCommit(chosen.key, common, (), {}, {}))
        return common

    def divide(self, group: Group, chosen: RestorableCommit, common: Snapshot) -> list[Bytes]:
        return self._redistribute(group, chosen, list_tensors(common), group.size, group.rank)

    def gather(self, group: Group, target: int) -> Snapshot | None:
        """The whole of the newest commit, on rank `target`; None on the others. `adopt` is its inverse."""
        commit = self._held[-1]
        chosen = RestorableCommit(commit.key, tuple(range(group.size)))
        shard = 0 if group.rank == target else -1
        pieces = self._redistribute(group, chosen, commit.tensors, 1, shard, target)
        if group.rank != target:
            return None
        extents, nbytes = lay_out(commit.tensors, 1, 0)
        begin = commit.common.memory.nbytes
        memory = np.zeros(begin + nbytes, np.uint8)
        memory[:begin] = commit.common.memory
        for extent, piece in zip(extents, pieces, strict=True):
            extent.of(memory[begin:])[...] = piece
        return Snapshot(commit.common.position, commit.common.values, memory)

    def adopt(self, whole: Snapshot) -> None:
        """Hold a commit that was gathered into one, and no other."""
        begin = whole.memory.nbytes - lay_out(list_tensors(whole), 1, 0)[1]
        common = Snapshot(whole.position, whole.values, whole.memory[:begin])
        key, shard = CommitKey(whole.position.step, FROM_CHECKPOINT, 1), whole.memory[begin:]
        self._held = [ShardedCommit(key, common, (), {0: shard}, {0: _compute_checksum(shard)})]

    def _find(self, key: CommitKey) -> ShardedCommit | None:
        return next((commit for commit in self._held if commit.key == key), None)

    def _redistribute(
        self,
        group: Group,
        chosen: RestorableCommit,
        tensors: Sequence[DividedTensor],
        size: int,
        own: int,
        first: int = 0,
    ) -> list[Bytes]:
        """The pieces of part `own` of `size` parts, which ranks from `first` on receive; -1: this rank gets none."""
        commit = self._find(chosen.key)
        held = {} if commit is None else commit.shards
        layouts = {shard: lay_out(tensors, chosen.key.size, shard)[0] for shard in held}
        pieces: list[Bytes] = []
        for batch in _batch(tensors):
            move = _Move(chosen, size, [tensors[number] for number in batch])
            outgoing: list[Bytes] = []
            splits = [0] * group.size
            for part in range(size):
                for number, shard, begin, end in move.list_rows(part, group.rank):
                    piece = layouts[shard][batch[number]].of(held[shard])
                    outgoing.append(move.slice(piece, number, begin, end, chosen.key.size, shard))
                    splits[first + part] += outgoing[-1].nbytes
            sent = np.concatenate(outgoing) if outgoing else np.empty(0, np.uint8)
            received = _move_checked(group, sent, splits)
            pieces += move.assemble(received, own, group.size)
        return pieces


class _Move:
    """How some tensors go from the shards of a commit to the parts of another division."""

    def __init__(self, chosen: RestorableCommit, size: int, tensors: Sequence[DividedTensor]) -> None:
        self._chosen = chosen
        self._size = size
        self._tensors = tensors

    def list_rows(self, part: int, sender: int) -> Iterator[tuple[int, int, int, int]]:
        """What a rank sends to a part: (tensor, shard that has it, first row, row after the last)."""
        for number, tensor in enumerate(self._tensors):
            for shard, begin, end in find_overlaps(tensor.rows, self._chosen.key.size, self._size, part):
                if self._chosen.senders[shard] == sender:
                    yield number, shard, begin, end

    def slice(self, piece: Bytes, number: int, begin: int, end: int, size: int, part: int) -> Bytes:
        rows, row_bytes = self._tensors[number]
        first = get_shard_range(rows, size, part)[0]
        return piece[(begin - first) * row_bytes : (end - first) * row_bytes]

    def assemble(self, received: Bytes, part: int, ranks: int) -> list[Bytes]:
        """Put what came from all ranks, in their order, into the pieces of a part; -1: of none."""
        if part < 0:
            return []
        pieces = [np.empty(tensor.count_piece_bytes(self._size, part), np.uint8) for tensor in self._tensors]
        offset = 0
        for sender in range(ranks):
            for number, _, begin, end in self.list_rows(part, sender):
                target = self.slice(pieces[number], number, begin, end, self._size, part)
                target[...] = received[offset : offset + target.nbytes]
                offset += target.nbytes
        return pieces


def _compute_checksum(memory: Bytes) -> int:
    """The sum of all words of 64 bits, which any flipped bit changes. It takes a fifth of the time of crc32."""
    words = memory.nbytes // 8 * 8
    rest = int.from_bytes(memory[words:].tobytes(), "little")
    return (int(memory[:words].view(np.uint64).sum()) + rest) % 2**64


def _require_checksum(group: Group, arrived: Bytes, checksum: int, what: str) -> None:
    """If what arrived is not what was sent, abort the group: the next world tries again."""
    if _compute_checksum(arrived) != checksum:
        reason = f"{what} that rank {group.rank} received is not the one that was sent"
        group.abort(reason)
        raise CollectiveError((), reason)


def _move_checked(group: Group, sent: Bytes, splits: list[int]) -> Bytes:
    received, lengths = group.alltoall(sent, splits)
    each = [1] * group.size
    checksums = np.array([_compute_checksum(part) for part in split(sent, splits)], np.uint64)
    expected, _ = group.alltoall(checksums, each, incoming=each)
    for rank, part in enumerate(split(received, lengths)):
        _require_checksum(group, part, int(expected[rank]), f"the part of a commit from rank {rank}")
    return received


def _batch(tensors: Sequence[DividedTensor]) -> Iterator[list[int]]:
    batch: list[int] = []
    nbytes = 0
    for number, tensor in enumerate(tensors):
        batch.append(number)
        nbytes += tensor.rows * tensor.row_bytes
        if nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _read_key(packed: Sequence[Any]) -> CommitKey:
    number, fence, size = packed
    return CommitKey(number, (fence[0], fence[1]), size)
