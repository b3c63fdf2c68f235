"""A divided state over worlds of threads: whoever dies at whichever exchange, all continue from one commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_collectives import CollectiveError
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.fsdp import DividedHandler, FSDPState
from spark_elastic.handwritten.sharded_commits import DividedTensor, get_shard_range
from spark_elastic.handwritten.torch_state import ElasticSampler
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder
from tests.unit.state.stage import Event, FakeDriver, FakeSession

STEPS, ROWS = 8, (7, 2)  # rows of the two tensors


class Rows:
    """This rank's rows of two tensors. Row i begins as i, and each step adds 1."""

    def __init__(self, session: FakeSession) -> None:
        place = session.world.size, session.group.rank
        self.parts = [np.arange(*get_shard_range(rows, *place)) * 1.0 for rows in ROWS]


class RowsHandler(DividedHandler):
    def capture(self, builder: SnapshotBuilder) -> Any:
        return [
            builder.add_piece(DividedTensor(rows, 8), part.view(np.uint8))  # type: ignore[attr-defined]
            for rows, part in zip(ROWS, self.value.parts, strict=True)
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
        while state.step < STEPS:
            stage.reach_step(state.step)
            gradient = np.ones(1)
            session.allreduce(gradient)
            for part in state.rows.parts:
                part += gradient / session.world.size
            state.step += 1
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
