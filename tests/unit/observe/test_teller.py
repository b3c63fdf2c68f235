"""People are told in order; one who blocks costs sentences, never the time of who tells."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import pytest

from spark_elastic.observe import teller as module
from spark_elastic.observe.teller import Teller


def test_sentences_come_in_order_and_the_end_tells_the_rest() -> None:
    told: list[int] = []
    with Teller() as teller:
        for number in range(100):
            teller.tell(partial(told.append, number))
    assert told == list(range(100))


def test_of_progress_the_newest_alone_waits() -> None:
    told: list[object] = []
    taken, free = threading.Event(), threading.Event()
    with Teller(most_waiting=2) as teller:
        teller.tell(lambda: (taken.set(), free.wait(20)))
        assert taken.wait(20)
        teller.tell(partial(told.append, "first"))
        for number in range(1000):
            teller.progress(partial(told.append, number))
        teller.tell(partial(told.append, "dropped"))
        free.set()
    assert told == ["first", 999]


def test_what_was_dropped_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    taken, free = threading.Event(), threading.Event()
    with Teller(most_waiting=1) as teller:
        teller.tell(lambda: (taken.set(), free.wait(20)))
        assert taken.wait(20)
        for text in ("a", "b", "c"):
            teller.tell(partial(told.append, text))
        free.set()
    assert told == ["a"]
    assert [record.getMessage() for record in caplog.records] == [
        "2 sentences were dropped: they came faster than they were read"
    ]


def test_a_listener_that_fails_is_logged_and_hears_on(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    with Teller() as teller:
        teller.tell(lambda: 1 / 0)
        teller.progress(lambda: 1 / 0)
        teller.progress(partial(told.append, "on"))
        teller.tell(partial(told.append, "and on"))
    assert told == ["on", "and on"]
    assert {record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR} <= {
        "the narrator failed"
    }


def test_the_end_waits_for_nobody_who_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    free = threading.Event()
    before = time.monotonic()
    with Teller() as teller:
        teller.tell(lambda: free.wait(20))
    assert time.monotonic() - before < 10
    free.set()
    teller._thread.join(20)
