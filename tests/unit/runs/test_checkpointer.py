"""Commits that outlive all workers: which are written, how long the end waits, who continues (P7); snapshots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.handwritten.object_state import ObjectState, State
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.runs import checkpoint
from spark_elastic.runs.checkpoint import (
    Checkpointer,
    CheckpointPolicy,
    SnapshotReader,
)
from spark_elastic.runs.handlers import StateHandler
from spark_elastic.runs.snapshot import PickleCodec, Snapshot, SnapshotBuffer, SnapshotBuilder
from tests.full_process import refuse_next_thread
from tests.memory_store import make_memory_store
from tests.patience import until
from tests.unit.handwritten.stage import FakeDriver


class SimulatedJob:
    """A job of so many workers over one store, up to a step."""

    def __init__(
        self, store: Store, size: int, until: int, resume: tuple[Checkpoint, ...] = (), **more: Any
    ) -> None:
        self.told: list[Checkpoint] = []
        self.trained: list[list[int]] = []
        stage = FakeDriver(size)
        policy = CheckpointPolicy("run", steps=2, seconds=None)
        stage.checkpointer = Checkpointer(store, policy, SystemClock(), PickleCodec(), self.told.append)
        stage.snapshot_reader = SnapshotReader(store, "run", PickleCodec())
        stage.resume = resume

        def loop(state: Any) -> float:
            trained: list[int] = []  # by the worker's newest world
            self.trained.append(trained)
            for _ in stage.take_steps(state, until):
                state.numbers = state.numbers + 1
                trained.append(state.step - 1)
                state.commit()
            return float(state.numbers[0])

        try:
            self.results = stage.train(loop, lambda session: ObjectState(step=0, numbers=np.zeros(3), **more))
        finally:
            stage.checkpointer.close()
        self.stall_seconds = stage.checkpointer.stall_seconds


def test_p7_due_commits_and_the_last_one_are_written_and_resumed_from() -> None:
    store = make_memory_store()
    first = SimulatedJob(store, size=2, until=7)
    steps = [checkpoint.position.step for checkpoint in first.told]
    assert steps[-1] == 7, "the end is not durable"
    assert set(steps) <= {1, 3, 5, 7}
    assert first.stall_seconds > 0, "the report of the job takes checkpoints to be free"
    second = SimulatedJob(store, size=3, until=10, resume=tuple(reversed(first.told)))
    assert second.trained == [[7, 8, 9]] * 3
    assert second.results == [10.0] * 3
    assert second.told[-1].position.step == 10


def test_p7_a_checkpoint_read_for_a_broken_world_is_used_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_memory_store()
    written = tuple(reversed(SimulatedJob(store, size=1, until=7).told))
    reader = SnapshotReader(store, "run", PickleCodec())
    first = reader.read(written)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "read_bytes", None)  # a store that cannot be read at all
        assert reader.read(list(written)) is first
    assert reader.read(written[1:]).position < first.position
    again = reader.read(written)
    reader.forget()
    assert reader.read(written) is not again, "it is kept for as long as the training takes"


class UnsavedHandler(StateHandler):
    """Not part of any snapshot."""

    def save(self) -> None: ...
    def restore(self) -> None: ...
    def sync(self) -> None: ...


class StateWithOwnHandler(ObjectState):
    registry = ((dict, UnsavedHandler),)


class UserState(State):
    def save(self) -> None: ...
    def restore(self) -> None: ...
    def sync(self) -> None: ...


def make_checkpointer(told: list[Checkpoint] | None = None) -> Checkpointer:
    policy, report = CheckpointPolicy("run"), ([] if told is None else told).append
    return Checkpointer(make_memory_store(), policy, SystemClock(), PickleCodec(), report)


def _fail_if_called(state: State) -> None:
    raise AssertionError("training began")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: StateWithOwnHandler(mine={}), "the handler of 'mine' takes no part"),
        (UserState, "this one is a UserState"),
    ],
)
def test_values_that_cannot_be_checkpointed_are_refused_by_name(
    make: Callable[[], State], sentence: str
) -> None:
    stage = FakeDriver(1)
    stage.checkpointer = make_checkpointer()
    with pytest.raises(InvalidInput, match=sentence):
        stage.train(_fail_if_called, lambda session: make())


def test_checkpoints_of_another_state_are_refused() -> None:
    store = make_memory_store()
    first = SimulatedJob(store, size=1, until=3, extra=Sampler())
    with pytest.raises(InvalidInput, match="of a state of other names"):
        SimulatedJob(store, size=1, until=5, resume=tuple(first.told[-1:]))


class Sampler:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, given: dict[str, int]) -> None: ...


class SlowStore:
    """Answers when it is told to, fails as often as told, and keeps the steps of the checkpoints that it was given."""

    def __init__(self, failures: int = 0) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        self.failures = failures
        self.written: list[int] = []

    def write(self, fence: Fence, position: Position, parts: Mapping[str, bytes]) -> Checkpoint:
        self.asked.set()
        assert self.answers.wait(45)
        if self.failures:
            self.failures -= 1
            raise StoreError("no answer")
        self.written.append(position.step)
        return Checkpoint(fence, position, "name", "digest")


def use_store(store: SlowStore, told: list[Checkpoint], monkeypatch: pytest.MonkeyPatch) -> Checkpointer:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "CheckpointStore", lambda *given: store)
        return make_checkpointer(told)


def make_snapshot(step: int) -> Snapshot:
    return Snapshot(Position(0, Phase.TRAIN, step), {}, np.zeros(1, np.uint8))


FENCE, OFFERED = Fence(1, 1), make_snapshot(7)


def start_writing(store: SlowStore, told: list[Checkpoint], monkeypatch: pytest.MonkeyPatch) -> Checkpointer:
    writer = use_store(store, told, monkeypatch)
    writer.offer(FENCE, OFFERED)
    return writer


@pytest.mark.parametrize(
    ("failures", "offered", "written"),
    [
        pytest.param(1, [(1, 7)] * 3, [7], id="it failed the first time, and is there the third time"),
        pytest.param(0, [(1, 9), (2, 6), (2, 9)], [9, 6, 9], id="the second world went back"),
    ],
)
def test_p7_only_what_this_world_has_written_is_not_written_again(
    failures: int, offered: list[tuple[int, int]], written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlowStore(failures)
    store.answers.set()
    checkpointer = use_store(store, [], monkeypatch)
    for generation, step in offered:
        checkpointer.offer(Fence(1, generation), make_snapshot(step))
        checkpointer.flush()
    assert store.written == written
    checkpointer.close()


def test_p7_the_writer_waits_for_a_slow_store_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "WARN_INTERVAL", 0.02)
    store, told = SlowStore(), list[Checkpoint]()
    writer = start_writing(store, told, monkeypatch)
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        flushing = pool.submit(writer.flush)
        try:
            assert until(lambda: "still being written, after 0.06 s" in caplog.text)
            assert not flushing.done()
        finally:
            store.answers.set()
        flushing.result(45)
    assert [checkpoint.position for checkpoint in told] == [OFFERED.position]
    writer.close()


def test_a_store_that_never_answers_ends_the_wait_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "WARN_INTERVAL", 0.02)
    monkeypatch.setattr(checkpoint, "FLUSH_TIMEOUT", 0.04)
    store, told = SlowStore(), list[Checkpoint]()
    writer = start_writing(store, told, monkeypatch)
    writer.flush()
    assert "given up: the store does not answer" in caplog.text
    assert not told
    store.answers.set()
    writer.close()


@pytest.mark.parametrize(("failures", "told"), [(1, [OFFERED.position]), (2, [])])
def test_p7_a_checkpoint_that_fails_after_it_was_offered_again_is_written_again(
    failures: int, told: list[Position], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last commit of a job, which nothing offers a third time."""
    store, written = SlowStore(failures), list[Checkpoint]()
    writer = start_writing(store, written, monkeypatch)
    assert store.asked.wait(45)
    writer.offer(FENCE, OFFERED)
    store.answers.set()
    writer.flush()
    assert [checkpoint.position for checkpoint in written] == told
    writer.close()


def test_p7_a_writer_whose_thread_cannot_start_writes_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_next_thread(monkeypatch)
    store, told = SlowStore(), list[Checkpoint]()
    writer = start_writing(store, told, monkeypatch)
    assert "checkpoint not written: can't start new thread" in caplog.text
    store.answers.set()
    writer.flush()
    assert not told
    writer.offer(FENCE, OFFERED)
    writer.flush()
    assert len(told) == 1
    writer.close()


def at(number: int) -> Position:
    return Position(0, Phase.TRAIN, number)


def read_newest(buffer: SnapshotBuffer) -> tuple[int, bytes]:
    newest = buffer.wait_for_newest()
    assert newest is not None
    return newest.position.step, newest.memory.tobytes()


def test_r20_a_version_exists_only_when_it_is_complete() -> None:
    live, buffer = np.full(1 << 20, 1, np.uint8), SnapshotBuffer()
    buffer.begin(at(1), lambda builder: builder.add(live, lambda: 0))
    assert read_newest(buffer) == (1, bytes([1]) * (1 << 20))
    live[:] = 2
    buffer.begin(at(2), lambda builder: builder.add(live, lambda: 0))
    buffer.wait()
    live[:] = 3
    assert read_newest(buffer) == (2, bytes([2]) * (1 << 20))


def test_r20_a_version_that_was_changed_while_it_was_copied_does_not_count() -> None:
    live, changes = np.full(1 << 20, 1, np.uint8), [0]
    buffer = SnapshotBuffer()
    buffer.begin(at(1), lambda builder: builder.add(live, lambda: changes[0]))
    buffer.wait()
    marks = iter([0, 1])
    buffer.begin(at(2), lambda builder: builder.add(live, lambda: next(marks)))
    with pytest.warns(RuntimeWarning, match="changed in place"):
        assert read_newest(buffer)[0] == 1
    buffer.begin(at(3), lambda builder: builder.add(live, lambda: changes[0]))
    assert read_newest(buffer)[0] == 3


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    builder = SnapshotBuilder()
    places = [builder.add(np.zeros(n, np.uint8)) for n in (1, 64, 0, 65)]
    assert [place.offset for place in places] == [0, 64, 128, 128]
    assert builder.size == 256


def test_two_buffers_alternate_and_grow_with_the_state() -> None:
    buffer, memories = SnapshotBuffer(), []
    for size in (128, 128, 128, 128, 1000, 20):
        buffer.begin(at(size), lambda builder, size=size: builder.add(np.full(size, 7, np.uint8)))  # type: ignore[misc]
        newest = buffer.wait_for_newest()
        assert newest is not None
        assert bytes(newest.memory[:size]) == bytes([7]) * size
        memories.append(newest.memory.ctypes.data)
    assert memories[0] == memories[2] != memories[1] == memories[3]
