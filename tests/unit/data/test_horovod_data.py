"""Horovod's sampler and loaders: rows exact over any worlds; the same batches with and without a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data import AsyncDataLoaderMixin, BaseDataLoader
from spark_elastic.data.horovod_data import ElasticSampler
from spark_elastic.errors import InvalidInput


class World:
    """What rank and size are asked of."""

    def __init__(self, size: int) -> None:
        self.size = size

    def sampler(self, rows: int, rank: int, shuffle: bool = True, pad: bool = False) -> ElasticSampler:
        return ElasticSampler(range(rows), shuffle, 3, rank=lambda: rank, size=lambda: self.size, pad=pad)


@pytest.mark.scenario("U2")
@given(
    st.integers(1, 200),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_p1_each_row_once_over_any_worlds(rows: int, batch: int, worlds: list[tuple[int, int]]) -> None:
    """Each world takes some steps; the next one, of another size, carries on from the one integer."""
    state, seen = {"epoch": 2, "processed_num": 0}, []
    for size, steps in [*worlds, (3, rows)]:
        samplers = [World(size).sampler(rows, rank) for rank in range(size)]
        for sampler in samplers:
            sampler.load_state_dict(state)
        lists = [list(sampler) for sampler in samplers]
        for step in range(steps):
            seen += [i for mine in lists for i in mine[step * batch : (step + 1) * batch]]
            for sampler in samplers:
                sampler.record_batch(step, batch)
        assert len({tuple(sampler.state_dict().items()) for sampler in samplers}) == 1
        state = samplers[0].state_dict()
    assert sorted(seen) == list(range(rows))


@pytest.mark.scenario("G10")
@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20))
def test_w5_padded_ranks_have_equally_many_rows_and_only_the_last_come_twice(
    rows: int, processed: int, size: int
) -> None:
    """Also where fewer rows are left than there are ranks."""
    samplers = [World(size).sampler(rows, rank, pad=True) for rank in range(size)]
    for sampler in samplers:
        sampler.load_state_dict({"epoch": 1, "processed_num": processed})
    lists = [list(sampler) for sampler in samplers]
    left = max(0, rows - processed)
    assert {len(mine) for mine in lists} == {-(-left // size)}
    assert {(s.num_samples * size, s.total_size) for s in samplers} == {(sum(map(len, lists)),) * 2}
    in_turn = [row for step in zip(*lists, strict=True) for row in step]
    assert in_turn[:left] == samplers[0].remaining_indices
    assert len(set(in_turn)) == left


def test_p2_with_a_fixed_global_batch_steps_do_not_depend_on_the_world() -> None:
    def step_rows(size: int, batch: int) -> list[set[int]]:
        lists = [list(World(size).sampler(96, rank)) for rank in range(size)]
        return [{i for mine in lists for i in mine[s * batch : (s + 1) * batch]} for s in range(8)]

    assert step_rows(1, 12) == step_rows(2, 6) == step_rows(3, 4) == step_rows(4, 3)


def test_epochs_differ_and_begin_without_processed_rows() -> None:
    sampler = World(1).sampler(50, 0)
    first = list(sampler)
    sampler.record_batch(0, 20)
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 0}
    assert sorted(sampler) == sorted(first)
    assert list(sampler) != first


def test_rows_that_were_recorded_one_by_one_do_not_come_again() -> None:
    world = World(2)
    sampler = world.sampler(12, 0)
    order = sampler.remaining_indices
    sampler.record_batch(0, 2)
    own = sampler.get_indices(1, 2)
    assert own == list(sampler)[2:4]
    sampler.record_indices([own[0], order[-1], order[0]])
    assert sampler.processed_indices == {*order[:4], own[0], order[-1]}
    assert sampler.processed_num == 6
    progress = sampler.state_dict()
    sampler.reset()
    assert sampler.remaining_indices == [row for row in order[4:-1] if row != own[0]], "in the same order"
    sampler.record_batch(0, 1)
    assert sampler.processed_num == 8
    other = world.sampler(12, 1)
    other.load_state_dict(progress)
    other.record_batch(0, 1)
    assert other.state_dict() == sampler.state_dict()
    other.set_epoch(1)
    assert other.state_dict() == {"epoch": 1, "processed_num": 0}


@pytest.mark.parametrize(
    ("state", "left"),
    [
        ({"epoch": 0, "processed_indices": [0, 1, 5]}, [2, 3, 4, 6, 7]),  # Horovod's before 0.24
        ({"epoch": 0, "processed_indices": {0}}, [1, 2, 3, 4, 5, 6, 7]),
        ({"epoch": 0, "processed_num": 5}, [5, 6, 7]),
    ],
)
def test_w5_states_of_horovods_sampler_are_loaded(state: dict[str, object], left: list[int]) -> None:
    sampler = World(1).sampler(8, 0, shuffle=False)
    sampler.load_state_dict(state)
    assert list(sampler) == left


def test_w5_rows_of_a_rank_can_be_read_and_processed_ones_set_as_in_horovod() -> None:
    sampler = ElasticSampler(range(10), shuffle=False, rank=lambda: 1, size=lambda: 2)
    assert sampler.indices == list(sampler) == [1, 3, 5, 7, 9]
    sampler.record_batch(0, 2)
    sampler.processed_indices = {0, 1, 2, 9}
    sampler.reset()
    assert sampler.processed_indices == {0, 1, 2, 9}
    assert sampler.indices == [4, 6, 8]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidInput, match="takes a dataset with a length; got int"):
        ElasticSampler(5, rank=lambda: 0, size=lambda: 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="batch_size"):
        World(1).sampler(5, 0).record_batch(0, 0)
    with pytest.raises(InvalidInput, match="row 5 of 5"):
        World(1).sampler(5, 0).record_indices([4, 5])
    with pytest.raises(InvalidInput, match="Rank 3"):
        World(2).sampler(5, 3)


class Numbers(BaseDataLoader):
    def __init__(self, end: int, fails_at: int | None = None) -> None:
        self.end, self.fails_at = end, fails_at
        self.made: list[tuple[int, str]] = []
        self.epoch = 0
        self.full = threading.Event()

    def __len__(self) -> int:
        return self.end

    def _iterate(self) -> Iterator[int]:
        for number in range(self.end):
            if number == self.fails_at:
                raise ValueError("number 3 is bad")
            self.made.append((number, threading.current_thread().name))
            if number == 2:
                self.full.set()
            yield number + 100 * self.epoch

    def _process_batch(self, batch: int) -> int:
        return -batch


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def _threads() -> int:
    return sum(thread.name == "batches-ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("room", [0, 1, 64])
def test_batches_are_those_of_the_plain_loader_in_each_epoch(room: int) -> None:
    plain, ahead = Numbers(5), AsyncNumbers(room, False, 5)
    for epoch in range(2):
        plain.epoch = ahead.epoch = epoch  # between epochs: nothing of the next one is made before
        assert list(ahead) == list(plain) == [-(100 * epoch) - number for number in range(5)]
    assert len(ahead) == 5
    assert {name for _, name in ahead.made} == {"MainThread" if room == 0 else "batches-ahead"}
    assert _threads() == 0


def test_no_more_is_made_than_there_is_room_for() -> None:
    ahead = AsyncNumbers(async_loader_queue_size=2, end=50)
    batches = iter(ahead)
    assert next(batches) == 0
    assert ahead.full.wait(30)  # one is taken, two lie ready
    assert len(ahead.made) <= 4  # and one may be in its hand
    ahead.close_async_loader()
    assert list(batches) == []
    assert _threads() == 0


def test_an_error_is_raised_behind_the_batches_before_it() -> None:
    batches = iter(AsyncNumbers(64, False, 9, fails_at=3))
    assert [next(batches) for _ in range(3)] == [0, -1, -2]
    with pytest.raises(ValueError, match="number 3 is bad"):
        next(batches)
    assert _threads() == 0


def test_a_loop_that_is_left_leaves_no_thread() -> None:
    for batch in AsyncNumbers(1, False, 1000):
        if batch == -3:
            break
    assert _threads() == 0
