"""A state of named values: one snapshot over all of them."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_collectives import CollectiveError
from spark_elastic.clock import SystemClock
from spark_elastic.data.horovod_data import ElasticSampler
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.runs import snapshot as snapshot_module
from spark_elastic.runs.handlers import StateHandler, find_handler
from tests.unit.state.stage import FakeDriver, FakeSession, Weights, WeightsState


@given(st.lists(st.sampled_from(["step", "save", "restore"]), max_size=30))
def test_values_and_weights_are_always_of_one_version(actions: list[str]) -> None:
    state: Any = WeightsState(weights=Weights(), step=0)
    saved = 0
    for action in actions:
        if action == "step":
            state._snapshots.wait()
            state.weights.add(1.0)
            state.step += 1
        elif action == "save":
            state.save()
            saved = state.step
        else:
            state.restore()
            assert state.step == saved
        assert state.weights.numbers.tolist() == [state.step] * 8


def test_saved_values_share_no_memory_with_current_ones() -> None:
    state: Any = ObjectState(history=[1], table={"a": [1]}, best=np.arange(3))
    state.history.append(2)
    state.table["a"].append(2)
    state.best += 1
    state.restore()
    assert (state.history, state.table, state.best.tolist()) == ([1], {"a": [1]}, [0, 1, 2])


def test_a_sampler_is_divided_anew_in_each_world() -> None:
    size = [2]
    sampler = ElasticSampler(range(8), shuffle=False, rank=lambda: 0, size=lambda: size[0])
    state: Any = ObjectState(sampler=sampler)
    sampler.record_batch(0, 2)
    size[0] = 1
    state.on_reset()
    assert list(state.sampler) == [4, 5, 6, 7]


class UserHandler(StateHandler):
    """A user's handler, as Horovod has them."""

    def save(self) -> None:
        self.kept = list(self.value)

    def restore(self) -> None:
        self.value[:] = self.kept

    def sync(self) -> None:
        self.value.append(f"synced from {self.source_rank}")
        self.save()


def test_a_users_handler_takes_part() -> None:
    class LoudState(ObjectState):
        registry = ((list, UserHandler),)

    state: Any = LoudState(words=["a"], count=1)
    state.words.append("b")
    state.count = 2
    state.restore()
    assert (state.words, state.count) == (["a"], 1)

    def work(session: FakeSession) -> list[str]:
        state: Any = LoudState(words=[], count=0)
        state.attach(session)
        state.begin_world(1, 7)
        return list(state.words)

    assert FakeDriver(2).play(work) == [["synced from 1"]] * 2


def test_w3_a_rank_with_half_a_state_does_not_report_its_position() -> None:
    """A user's handler breaks; the rest of the state is not taken over without it."""

    class BreakingHandler(UserHandler):
        def sync(self) -> None:
            raise CollectiveError((), "it broke here")

    class BrokenState(ObjectState):
        registry = ((list, BreakingHandler),)

    def work(session: FakeSession) -> Any:
        state: Any = BrokenState(words=[], count=session.group.rank)
        state.attach(session)
        if session.group.rank == 0:
            state._handlers["words"].sync = lambda: None
        with suppress(CollectiveError):
            state.begin_world(0, 7)
        session.close_group()
        state.restore()
        return session.group.rank, state.count, state._number

    assert (1, 1, 0) in FakeDriver(2).play(work)


def test_r05_a_state_that_arrives_damaged_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    crc = snapshot_module._compute_crc
    monkeypatch.setattr(snapshot_module, "_compute_crc", lambda data: crc(data) + (data.nbytes > 400))
    damaged: list[int] = []

    def work(session: FakeSession) -> Any:
        rank = session.group.rank
        state: Any = WeightsState(weights=Weights(64, fill=float(rank)), step=rank)
        state.attach(session)
        if rank == 0:
            monkeypatch.setattr(snapshot_module, "_compute_crc", crc)
            state.sync()
            return None
        # Rank 1 sees other bytes than were sent.
        broadcast = session.group.broadcast

        def flip_bits(array: Any, root: int) -> None:
            broadcast(array, root)
            if array.nbytes == 512:
                array[7] ^= 1

        monkeypatch.setattr(session.group, "broadcast", flip_bits)
        with pytest.raises(StoreError, match="not taken over"):
            state.sync()
        damaged.append(1)
        state.restore()
        return state.step, state.weights.numbers[0]

    assert (1, 1.0) in FakeDriver(2).play(work)
    assert damaged == [1]


def test_r20_a_resume_waits_for_the_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a state that was just made; else the user is told that he changed a parameter after a commit."""
    reader: Any = SimpleNamespace(read=lambda candidates: kept)
    kept = WeightsState(weights=Weights(fill=5.0), step=3)._snapshots.wait_for_newest()
    copy = snapshot_module._copy

    def copy_slowly(pieces: Any, memory: Any) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            SystemClock().sleep(0.1)
        copy(pieces, memory)

    monkeypatch.setattr(snapshot_module, "_copy", copy_slowly)
    state: Any = WeightsState(weights=Weights(), step=0)
    state.restore_checkpoint(reader, ())
    state._snapshots.wait()
    assert (state.step, state.weights.numbers[0]) == (3, 5.0)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"commit": 1}, "commit"),
        ({"_private": 1}, "_private"),
        ({"registry": 1}, "registry"),
        ({"lock": threading.Lock()}, "pickled"),
    ],
)
def test_values_that_a_state_cannot_have_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        ObjectState(**values)


class Schedule:
    def __init__(self) -> None:
        self.rate = 1.0

    def state_dict(self) -> dict[str, float]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.rate = state["rate"]


def test_anything_with_a_state_dict_keeps_its_identity() -> None:
    schedule = Schedule()
    state: Any = ObjectState(schedule=schedule)
    schedule.rate = 0.1
    state.restore()
    assert state.schedule is schedule
    assert schedule.rate == 1.0
    assert find_handler(3, ()) is None


@pytest.mark.parametrize("callbacks", [[None], [print, 3], print])
def test_what_is_no_function_is_no_reset_callback(callbacks: Any) -> None:
    state = ObjectState(step=0)
    with pytest.raises(InvalidInput, match="takes a list of functions, such as"):
        state.register_reset_callbacks(callbacks)
    state.on_reset()
