"""The thread that decodes row groups before they are fetched."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from spark_elastic.data.loader import DecodePrefetcher
from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.errors import StoreError
from tests.patience import until


class Reader:
    """Counts. What is decoded ahead is held up by a closed `gate`, fails if it is `broken`, and takes one of `room`."""

    def __init__(self) -> None:
        self.answers = 0
        self.ahead: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.tried: list[int] = []
        self.broken = False
        self.room = 100

    def count_answer(self) -> None:
        self.answers += 1

    def fetch(self, group: int) -> ColumnArrays:
        if self.broken:
            raise StoreError("the disk is gone")
        return {"x": np.array([group])}

    def prefetch(self, group: int) -> bool:
        self.tried.append(group)
        assert self.gate.wait(20)
        self.fetch(group)
        if not self.room:
            return False
        self.room -= 1
        self.ahead.append(group)
        return True

    def release(self, group: int | None = None) -> None:
        self.room += 1

    def close(self) -> None:
        pass


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def ahead(reader: Reader) -> Iterator[DecodePrefetcher]:
    with DecodePrefetcher(reader, 3, reader.count_answer) as made:
        yield made
        reader.gate.set()


def test_what_was_asked_for_is_decoded_in_that_order(ahead: DecodePrefetcher, reader: Reader) -> None:
    ahead.ask([3, 1])
    ahead.ask([2])
    until(lambda: len(reader.ahead) == 3)
    assert reader.ahead == [3, 1, 2]
    until(lambda: reader.answers == 3)


def test_so_many_lie_decoded_until_one_is_fetched(ahead: DecodePrefetcher, reader: Reader) -> None:
    ahead.ask(range(6))
    until(lambda: len(reader.ahead) == 3)
    assert ahead.fetch(0)["x"][0] == 0
    until(lambda: len(reader.ahead) == 4)
    assert not ahead._can_decode()
    assert reader.ahead == [0, 1, 2, 3]


def test_what_was_fetched_meanwhile_is_left_out(ahead: DecodePrefetcher, reader: Reader) -> None:
    reader.gate.clear()
    ahead.ask([0])
    until(lambda: reader.tried)
    ahead.ask([1, 2])
    ahead.fetch(1)
    reader.gate.set()
    until(lambda: 2 in reader.ahead)
    assert reader.ahead == [0, 2]


def test_what_there_is_no_room_for_waits_for_a_release(ahead: DecodePrefetcher, reader: Reader) -> None:
    reader.room = 1
    ahead.ask([0, 1, 2])
    until(lambda: ahead._full)
    assert reader.tried == [0, 1]
    ahead.fetch(0)
    ahead.release(0)
    until(lambda: reader.tried == [0, 1, 1, 2])
    assert reader.ahead == [0, 1]


def test_a_release_while_there_is_no_room_is_not_missed(ahead: DecodePrefetcher, reader: Reader) -> None:
    reader.room = 0
    reader.gate.clear()
    ahead.ask([0])
    until(lambda: reader.tried)
    releases, ahead._releases = (
        ahead._releases,
        ahead._releases + 1,
    )  # as `release` does, behind the look for room
    assert releases == 0
    reader.gate.set()
    until(lambda: len(reader.tried) == 2)


def test_what_is_fetched_while_there_is_no_room_for_it_is_not_tried_again(
    ahead: DecodePrefetcher, reader: Reader
) -> None:
    reader.room = 0
    reader.gate.clear()
    ahead.ask([0, 1])
    until(lambda: reader.tried)
    ahead.fetch(0)
    reader.gate.set()
    until(lambda: ahead._full)
    assert reader.tried == [0, 1]


def test_a_reader_that_fails_is_told_where_rows_are_fetched(ahead: DecodePrefetcher, reader: Reader) -> None:
    reader.broken = True
    ahead.ask([0, 1])
    until(lambda: not ahead._thread.is_alive())
    with pytest.raises(StoreError, match="the disk is gone"):
        ahead.fetch(0)
    reader.broken = False
    assert ahead.fetch(1)["x"][0] == 1
    assert reader.tried == [0]
    assert reader.answers == 1


def test_small_row_groups_are_all_left_to_who_fetches(reader: Reader) -> None:
    with DecodePrefetcher(reader, 0, reader.count_answer) as ahead:
        ahead.ask([0, 1])
        assert ahead.fetch(0)["x"][0] == 0
        assert ahead._thread.ident is None
    assert reader.tried == []


def test_without_a_thread_to_be_had_all_is_left_to_who_fetches(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with DecodePrefetcher(reader, 3, reader.count_answer) as ahead:
        ahead.ask([0, 1])
        assert ahead.fetch(0)["x"][0] == 0
        ahead.release(0)
    assert reader.tried == []


def test_the_end_waits_for_what_is_under_way_alone(reader: Reader) -> None:
    reader.gate.clear()
    with DecodePrefetcher(reader, 3, reader.count_answer) as made:
        made.ask([0, 1, 2])
        until(lambda: reader.tried)
        opener = threading.Timer(0.05, reader.gate.set)
        opener.start()
    opener.join()
    assert reader.ahead == [0]
    assert not made._thread.is_alive()


def test_once_it_is_stopped_nothing_more_is_begun(ahead: DecodePrefetcher, reader: Reader) -> None:
    reader.gate.clear()
    ahead.ask([0, 1])
    until(lambda: reader.tried)
    ahead.stop()
    reader.gate.set()
    until(lambda: not ahead._thread.is_alive())
    assert reader.ahead == [0]
