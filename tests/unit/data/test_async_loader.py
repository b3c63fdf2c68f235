"""Horovod's loaders: the same batches with and without a thread, errors where they are used, no thread left behind."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator

import pytest

from spark_elastic.data import AsyncDataLoaderMixin, BaseDataLoader


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
    return sum(thread.name.startswith("batches-ahead") for thread in threading.enumerate())


def test_a_loader_without_batches_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="_iterate"):
        BaseDataLoader()  # type: ignore[abstract]


@pytest.mark.parametrize("room", [0, 1, 64])
def test_batches_are_those_of_the_plain_loader_in_each_epoch(room: int) -> None:
    plain, ahead = Numbers(5), AsyncNumbers(room, False, 5)
    for epoch in range(2):
        plain.epoch = ahead.epoch = epoch  # between epochs: nothing of the next one is made before
        assert list(ahead) == list(plain) == [-(100 * epoch) - number for number in range(5)]
    assert len(ahead) == 5
    assert {name for _, name in ahead.made} == {"MainThread" if room == 0 else "batches-ahead_0"}
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


def test_arguments_are_horovods() -> None:
    told = inspect.signature(AsyncDataLoaderMixin.__init__).parameters
    assert list(told) == ["self", "async_loader_queue_size", "debug_data_loader", "args", "kwargs"]
    assert (told["async_loader_queue_size"].default, told["debug_data_loader"].default) == (64, False)
