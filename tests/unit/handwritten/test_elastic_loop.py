"""States of named values and the run loop, over worlds of threads: whatever dies or joins, all is of one step."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_collectives import CollectiveError, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.data.horovod_data import ElasticSampler
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.handwritten.elastic_loop import choose_source, elastic
from spark_elastic.handwritten.object_state import HostsUpdatedInterrupt, ObjectState, State
from spark_elastic.protocol.types import START, HostUpdateResult, Phase, Position, WorldView
from spark_elastic.runs import snapshot as snapshot_module
from spark_elastic.runs.handlers import StateHandler, find_handler
from tests.unit.handwritten.stage import Event, FakeDriver, FakeSession, Weights, WeightsState
from tests.unit.protocol.driver_bench import make_world

STEPS = 12


def train(stage: FakeDriver, commit_every: int, check: bool) -> list[tuple[float, int]]:
    """Each step adds 1 to all weights, whatever the world's size."""
    numbers = itertools.count(0, 1000)  # another one on each worker, which newcomers must not keep

    def make(session: FakeSession) -> WeightsState:
        began_at = next(numbers)
        return WeightsState(weights=Weights(fill=float(began_at)), step=0, began_at=began_at)

    def loop(state: Any) -> tuple[float, int]:
        for gradient in stage.take_steps(state, STEPS):
            state._snapshots.wait()  # what an optimizer's hook does
            state.weights.add(gradient)
            assert state.weights.numbers.max() == state.step + state.began_at, "not of one version"
            if state.step % commit_every == 0:
                state.commit()
            elif check:
                state.check_host_updates()
        return float(state.weights.numbers.min()) - state.began_at, state.step

    return stage.train(loop, make)


events = st.builds(
    Event,
    step=st.integers(0, STEPS),
    rank=st.one_of(st.none(), st.integers(0, 3)),
    after=st.integers(1, 9),  # also in a hand-over
    slips=st.booleans(),
)


@pytest.mark.scenario("G16")
@example(
    2, [Event(5), Event(5, rank=1, after=2, slips=True)], 4, True
)  # an agreed stop breaks on one rank alone
@given(st.integers(1, 4), st.lists(events, max_size=4), st.integers(1, 4), st.booleans())
@settings(max_examples=150)
def test_w3_the_counter_equals_the_steps_under_any_schedule(
    size: int, script: list[Event], commit_every: int, check: bool
) -> None:
    stage = FakeDriver(size, tuple(sorted(script, key=lambda event: event.step)))
    results = train(stage, commit_every, check)
    assert results
    assert set(results) == {(float(STEPS), STEPS)}


@pytest.mark.parametrize(
    ("size", "update", "skips"), [(2, HostUpdateResult.added, False), (1, HostUpdateResult.removed, True)]
)
def test_on_hosts_updated_says_whether_workers_join_or_leave(
    size: int, update: HostUpdateResult, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[float, HostUpdateResult]] = []
    interrupts: list[bool] = []
    record = HostsUpdatedInterrupt.__init__

    def watch(error: HostsUpdatedInterrupt, skip_sync: bool = False) -> None:
        record(error, skip_sync)
        interrupts.append(error.skip_sync)

    monkeypatch.setattr(HostsUpdatedInterrupt, "__init__", watch)

    class ListeningState(ObjectState):
        def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
            heard.append((timestamp, update_res))

    def loop(state: Any) -> None:
        for _ in stage.take_steps(state, STEPS):
            if state.step == 5 and update == HostUpdateResult.removed and len(stage.sizes) == 1:
                stage.announce()
            state.check_host_updates()

    stage = FakeDriver(size, (Event(5),) if update == HostUpdateResult.added else ())
    stage.train(loop, lambda session: ListeningState(step=0))
    assert set(heard) == {(1.0, update)}
    assert set(interrupts) == {skips}


@pytest.mark.parametrize("joins", [True, False], ids=["a newcomer", "one who is behind"])
def test_r05_a_rank_whose_sync_failed_does_not_report_the_new_position(joins: bool) -> None:
    """The source dies while it hands over; of those who are left one has that state and one has not."""

    class ChangedState(WeightsState):
        def sync(self) -> None:
            assert self._session is not None
            if self._session.world.fence.generation == 2 and self._session.group.rank == 0:
                self._session.die()  # type: ignore[attr-defined]
            super().sync()

    def loop(state: Any) -> tuple[float, int]:
        for _ in stage.take_steps(state, STEPS):
            state._snapshots.wait()
            state.weights.add(1.0)
            state.commit()
        return float(state.weights.numbers[0]), state.step

    event = Event(5) if joins else Event(5, rank=2, after=1, slips=True)
    stage = FakeDriver(2 if joins else 3, (event,))
    made = stage.train(loop, lambda session: ChangedState(weights=Weights(), step=0))
    assert made == [(STEPS, STEPS)] * 2
    assert len(stage.sizes) == 3


def test_reset_callbacks_run_on_survivors_only() -> None:
    called: list[int] = []

    def make(session: FakeSession) -> ObjectState:
        state: Any = ObjectState(step=0, rate=1.0)

        def rescale() -> None:
            called.append(session.world.size)
            state.rate = 1.0 * session.world.size

        state.register_reset_callbacks([rescale])
        return state

    def loop(state: Any) -> float:
        for _ in stage.take_steps(state, STEPS):
            state.commit()
        return float(state.rate)

    stage = FakeDriver(2, (Event(5),))
    assert stage.train(loop, make) == [3.0] * 3
    assert called == [3, 3]


class UserState(State):
    """A user's own state: saved, restored and synced by methods of its own, which know rank 0 alone."""

    def __init__(self, session: FakeSession) -> None:
        super().__init__()
        self._own, self.step, self._kept = session, 0, 0

    def save(self) -> None:
        self._kept = self.step

    def restore(self) -> None:
        self.step = self._kept

    def sync(self) -> None:
        value = np.array([self.step], np.int64)
        self._own.group.broadcast(value, self.source_rank)
        self.step = int(value[0])
        self.save()


def test_a_users_own_state_works_through_losses_and_joins() -> None:
    def loop(state: UserState) -> int:
        for _ in stage.take_steps(state, STEPS):
            state.commit()
        return state.step

    stage = FakeDriver(3, (Event(3), Event(6, rank=0), Event(9)))
    assert set(stage.train(loop, UserState)) == {STEPS}


def test_without_a_worker_the_function_is_merely_called() -> None:
    state = ObjectState(step=0)

    def loop(state: Any) -> str:
        state.step = 3
        state.commit()
        state.step = 5
        state.restore()
        return f"step {state.step}"

    assert elastic(loop, lambda: None)(state) == "step 3"


def test_errors_that_no_other_world_can_repair_are_raised() -> None:
    def loop(state: Any) -> None:
        raise MismatchError((0,), "the user's own doing")

    with pytest.raises(MismatchError, match="own doing"):
        FakeDriver(1).train(loop, lambda session: ObjectState(step=0))


def test_a_second_call_of_the_users_function_continues_from_the_state_of_the_first() -> None:
    seen: list[int] = []

    def work(session: FakeSession) -> int:
        for _ in range(2):
            session.process_values.pop("entered", None)  # as the program does before each call

            def loop(state: Any) -> int:
                seen.append(state.step)
                state.step += 5
                state.commit()
                state.step += 100
                return int(state.step)

            result = elastic(loop, lambda: session)(ObjectState(step=0))
        return result

    assert FakeDriver(1).play(work) == [110]
    assert seen == [0, 5]


def test_two_states_in_one_function_are_refused() -> None:
    def work(session: FakeSession) -> None:
        for _ in range(2):
            elastic(lambda state: None, lambda: session)(ObjectState(step=0))

    with pytest.raises(InvalidInput, match="one state"):
        FakeDriver(1).play(work)


def test_one_state_may_be_trained_in_two_parts() -> None:
    def work(session: FakeSession) -> int:
        state = ObjectState(step=0)

        def more(state: Any) -> None:
            state.step += 3

        elastic(more, lambda: session)(state)
        elastic(more, lambda: session)(state)
        return int(state.step)

    assert FakeDriver(2).play(work) == [6, 6]


def _world(*positions: Position | None) -> WorldView:
    return make_world(2, {f"w{i}": position for i, position in enumerate(positions)}).view_of("w0")


def at(commits: int) -> Position:
    return Position(0, Phase.TRAIN, commits)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ((None, None), (0, 0)),
        ((START, START), (0, 0)),
        ((START, None), (0, 0)),
        ((at(4), at(4)), (None, 4)),
        ((at(4), None), (0, 4)),
        ((at(3), at(4)), (1, 4)),
    ],
)
def test_w2_the_source_of_a_sync_follows_from_the_world_alone(
    positions: tuple[Position | None, ...], expected: tuple[int | None, int]
) -> None:
    assert choose_source(_world(*positions)) == expected


def test_an_elastic_function_takes_a_state_first() -> None:
    with pytest.raises(InvalidInput, match=r"takes a state first, such as .*; got int"):
        elastic(lambda state: state, lambda: None)(3)  # type: ignore[arg-type]


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
