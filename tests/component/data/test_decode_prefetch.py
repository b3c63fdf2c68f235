"""The thread that decodes row groups before they are fetched."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from spark_elastic.data.loader import DecodePrefetcher
from spark_elastic.data.reading.decoding import ColumnArrays
from tests.full_process import refuse_next_thread
from tests.patience import until


class Reader:
    """Counts. What is decoded ahead is held up by a closed `gate`, and takes one of `room`."""

    def __init__(self) -> None:
        self.answers = 0
        self.ahead: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.tried: list[int] = []
        self.room = 100

    def count_answer(self) -> None:
        self.answers += 1

    def fetch(self, group: int) -> ColumnArrays:
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

    def announce(self, groups: Iterable[int]) -> None:
        pass

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


def test_decoding_pauses_at_its_limit_until_one_is_fetched(ahead: DecodePrefetcher, reader: Reader) -> None:
    ahead.ask(range(6))
    until(lambda: len(reader.ahead) == 3)
    assert ahead.fetch(0)["x"][0] == 0
    until(lambda: len(reader.ahead) == 4)
    assert not ahead._can_decode()
    assert reader.ahead == [0, 1, 2, 3]


def test_decoding_waits_for_a_release_where_there_is_no_room(ahead: DecodePrefetcher, reader: Reader) -> None:
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
    assert ahead._releases == 0
    ahead._releases = 1  # as `release` does, behind the look for room
    reader.gate.set()
    until(lambda: len(reader.tried) == 2)


@pytest.mark.parametrize("most", [0, 3], ids=["small row groups", "no thread can be started"])
def test_the_fetching_thread_decodes_where_there_is_no_other(
    most: int, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_next_thread(monkeypatch)
    with DecodePrefetcher(reader, most, reader.count_answer) as ahead:
        ahead.ask([0, 1])
        assert ahead.fetch(0)["x"][0] == 0
        ahead.release(0)
    assert reader.tried == []
