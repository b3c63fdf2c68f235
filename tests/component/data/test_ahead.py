"""The thread that decodes row groups before they are fetched."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from spark_elastic.data.reading.ahead import DecodeAhead
from spark_elastic.data.reading.reader import Decoded
from spark_elastic.errors import StoreError
from tests.patience import until


class Reader:
    """Counts; a closed `gate` holds up what is decoded ahead, `broken` makes it fail."""

    def __init__(self) -> None:
        self.ahead: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.broken = False

    def fetch(self, group: int) -> Decoded:
        return {"x": np.array([group])}

    def prefetch(self, group: int) -> None:
        self.begun.set()
        assert self.gate.wait(20)
        if self.broken:
            raise StoreError("the disk is gone")
        self.ahead.append(group)

    def release(self, group: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def ahead(reader: Reader) -> Iterator[DecodeAhead]:
    with DecodeAhead(reader) as made:
        yield made
        reader.gate.set()


def test_what_was_asked_for_is_decoded_in_that_order(ahead: DecodeAhead, reader: Reader) -> None:
    ahead.ask([3, 1, 3])
    ahead.ask([2])
    until(lambda: len(reader.ahead) == 3)
    assert reader.ahead == [3, 1, 2]


def test_what_was_fetched_meanwhile_is_left_out(ahead: DecodeAhead, reader: Reader) -> None:
    reader.gate.clear()
    ahead.ask([0])
    assert reader.begun.wait(20)
    ahead.ask([1, 2])
    assert ahead.fetch(1)["x"][0] == 1
    reader.gate.set()
    until(lambda: 2 in reader.ahead)
    assert reader.ahead == [0, 2]


def test_a_reader_that_fails_ahead_fails_where_rows_are_fetched_alone(
    ahead: DecodeAhead, reader: Reader
) -> None:
    reader.broken = True
    ahead.ask([0])
    assert reader.begun.wait(20)
    reader.broken = False
    ahead.ask([1])
    until(lambda: reader.ahead == [1])


def test_the_end_waits_for_what_is_under_way_alone(reader: Reader) -> None:
    reader.gate.clear()
    with DecodeAhead(reader) as made:
        made.ask([0, 1, 2])
        assert reader.begun.wait(20)
        opener = threading.Timer(0.05, reader.gate.set)
        opener.start()
    opener.join()
    assert reader.ahead == [0]
    assert not made._thread.is_alive()
