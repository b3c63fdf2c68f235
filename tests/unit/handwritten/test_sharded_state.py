"""A divided state: how it lies over the ranks; in worlds of threads, whoever dies, all continue from one commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.fsdp import DividedHandler, FSDPState
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
from spark_elastic.handwritten.torch_state import ElasticSampler
from spark_elastic.protocol.types import START
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder
from tests.fake_group import FakeFabric
from tests.unit.handwritten.stage import Event, FakeDriver, FakeSession

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
    owners = {row: part for part in range(old) for row in range(*get_shard_range(rows, old, part))}
    for rank in range(new):
        overlaps = find_overlaps(rows, old, new, rank)
        found = [(row, part) for part, first, last in overlaps for row in range(first, last)]
        assert found == [(row, owners[row]) for row in range(*get_shard_range(rows, new, rank))]


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
AGAIN = CommitKey(8, (1, 3), 1)


@pytest.mark.parametrize(
    ("held", "chosen"),
    [
        pytest.param(
            [[(OLD, [0, 2]), (NEW, [0])], [(OLD, [1, 0]), (NEW, [1, 0])]],
            RestorableCommit(OLD, (0, 1, 0)),
            id="a copy of the newer one never arrived",
        ),
        pytest.param(
            [[(OLD, [0, 2]), (NEW, [0, 2])], [(OLD, [1, 0]), (NEW, [1, 0])]],
            RestorableCommit(NEW, (0, 1, 0)),
            id="the newer one is whole",
        ),
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


STEPS, LENGTHS = 8, (7, 2)  # of the two tensors


class Rows:
    """This rank's rows of two tensors. Row i begins as i, and each step adds 1."""

    def __init__(self, session: FakeSession) -> None:
        place = session.world.size, session.group.rank
        self.parts = [np.arange(*get_shard_range(rows, *place)) * 1.0 for rows in LENGTHS]


class RowsHandler(DividedHandler):
    def capture(self, builder: SnapshotBuilder) -> Any:
        return [
            builder.add_piece(DividedTensor(rows, 8), part.view(np.uint8))  # type: ignore[attr-defined]
            for rows, part in zip(LENGTHS, self.value.parts, strict=True)
        ]

    def load(self, values: Any, memory: Bytes) -> None:
        for number, part in zip(values, self.value.parts, strict=True):
            part[...] = self.pieces[number].view(np.float64)


class RowsState(FSDPState):
    registry = ((Rows, RowsHandler),)


def make_state(session: FakeSession, cls: type[RowsState] = RowsState) -> RowsState:
    return cls(lambda state: {"rows": Rows(session)}, step=0)


def train(stage: FakeDriver, commit_every: int = 1, make: Any = make_state) -> list[list[float]]:
    """By how much each worker's rows have grown."""

    def loop(state: Any) -> list[float]:
        session = state._session
        for gradient in stage.take_steps(state, STEPS):
            for part in state.rows.parts:
                part += gradient
            if state.step % commit_every == 0:
                state.commit()
        session.finish_together()
        pairs = zip(state.rows.parts, Rows(session).parts, strict=True)
        return [number for part, begun in pairs for number in part - begun]

    return stage.train(loop, make)


losses = st.builds(
    Event,
    step=st.integers(0, STEPS - 1),
    rank=st.integers(0, 3),
    after=st.integers(1, 30),
    slips=st.booleans(),
)
joins = st.builds(Event, step=st.integers(0, STEPS - 1))


@given(st.integers(2, 4), losses, st.lists(joins, max_size=2), st.sampled_from([1, 3]))
@settings(max_examples=120, deadline=None)
def test_one_death_at_any_exchange_costs_nothing_but_the_steps_since_the_commit(
    size: int, loss: Event, joins: list[Event], commit_every: int
) -> None:
    stage = FakeDriver(size, tuple(sorted([loss, *joins], key=lambda event: event.step)))
    results = train(stage, commit_every)
    assert results
    assert all(set(result) <= {float(STEPS)} for result in results)


@example(
    1, [Event(step=1, rank=0, after=28), Event(step=4)]
)  # all holders die while a newcomer loads their commit
@given(st.integers(1, 4), st.lists(st.one_of(losses, joins), max_size=4))
@settings(max_examples=80, deadline=None)
def test_after_any_deaths_the_state_is_complete_or_the_error_names_the_missing_shards(
    size: int, events: list[Event]
) -> None:
    stage = FakeDriver(size, tuple(sorted(events, key=lambda event: event.step)))
    try:
        results = train(stage)
    except InvalidInput as error:
        if "is lost with the workers that held parts of it: shard" not in str(error):
            raise
        return
    assert all(set(result) <= {float(STEPS)} for result in results)


class CheckpointReader:
    """Reads the one checkpoint, of step 2, that a run of one worker has gathered."""

    def __init__(self) -> None:
        FakeDriver(1).train(self._take_steps, make_state)

    def _take_steps(self, state: Any) -> None:
        for _ in range(2):
            for part in state.rows.parts:
                part += 1
            state.step += 1
            state.commit()
        self.whole = state._commits.gather(state._session.group, 0)

    def read_published(self) -> tuple[()]:
        return ()

    def read(self, candidates: object) -> Any:
        return self.whole

    def forget(self) -> None:
        pass


def test_the_reader_of_a_checkpoint_that_replaces_a_lost_commit_may_be_lost_too() -> None:
    stage = FakeDriver(5, (Event(step=5, rank=0), Event(step=5, rank=1)))  # which hold all of shard 0
    stage.snapshot_reader = CheckpointReader()  # type: ignore[assignment]
    readers: list[FakeSession] = []

    class ReadersDie(RowsState):
        def restore_checkpoint(self, reader: Any, candidates: Any) -> None:
            session: Any = self._session
            readers.append(session)
            if len(readers) == 1 and stage.leave_others(session):
                session.die()
            super().restore_checkpoint(reader, candidates)

    results = train(stage, make=lambda session: make_state(session, ReadersDie))
    assert [set(result) for result in results] == [{float(STEPS)}] * 2
    assert len(readers) == 2


def build(state: Any) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: RowsState(None), "takes a function that makes the model"),  # type: ignore[arg-type]
        (lambda: RowsState(build).begin_alone(), "returns what it made by name"),
        (lambda: RowsState(lambda state: {"step": 1}, step=0).begin_alone(), "which the state has already"),
        (lambda: RowsState(lambda state: {"size": 1}).begin_alone(), "which has no state dict"),
        (lambda: RowsState(build).sync(), "synchronizes this state at the beginning of each world"),
        (lambda: RowsState(build, rows=Rows.__new__(Rows)), "'rows' belongs to a world: make it in build"),
        (lambda: FSDPState(build, sampler=ElasticSampler(range(3))), "takes no ElasticSampler"),
    ],
)
def test_wrong_use_gets_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        make()


def test_outside_of_a_job_build_is_called_once() -> None:
    calls = []

    def make(state: Any) -> dict[str, Any]:
        calls.append(state.step)
        rows = Rows.__new__(Rows)
        rows.parts = []
        return {"rows": rows}

    def loop(state: Any) -> Any:
        state.commit()
        return state.rows.parts

    assert elastic(loop, lambda: None)(RowsState(make, step=3)) == []
    assert calls == [3]


def test_a_commit_that_breaks_is_an_error_of_the_world() -> None:
    def loop(state: Any) -> None:
        state._session.group.abort("for the test")
        with pytest.raises(CollectiveError):
            state.commit()

    FakeDriver(1).train(loop, make_state)
