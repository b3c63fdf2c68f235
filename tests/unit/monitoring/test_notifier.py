"""People are told in order; one who blocks costs sentences, never the time of who tells."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import IO

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.monitoring import log_forwarding as module
from spark_elastic.monitoring.log_forwarding import AsyncNotifier, close_within_deadline
from spark_elastic.monitoring.progress import LineRateLimiter, OutputListener, ProgressListener


def test_sentences_come_in_order_and_the_end_tells_the_rest() -> None:
    told: list[int] = []
    with AsyncNotifier() as teller:
        for number in range(100):
            teller.tell(partial(told.append, number))
    assert told == list(range(100))


def test_of_progress_the_newest_alone_waits() -> None:
    told: list[object] = []
    taken, free = threading.Event(), threading.Event()
    with AsyncNotifier(most_waiting=2) as teller:
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
    with AsyncNotifier(most_waiting=1) as teller:
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
    with AsyncNotifier() as teller:
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
    with AsyncNotifier() as teller:
        teller.tell(lambda: free.wait(20))
    assert time.monotonic() - before < 10
    free.set()
    teller._thread.join(20)


class Terminal(io.StringIO):
    """Nobody reads it while `goes_on` is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.held = threading.Event()

    def write(self, text: str) -> int:
        if not self.goes_on.is_set():
            self.held.set()
            self.goes_on.wait(20)
        return super().write(text)


def output(stream: IO[str]) -> OutputListener:
    return OutputListener(
        stream, SystemClock(), timestamps=False, worlds=True, lines=True, limit=LineRateLimiter()
    )


def progress(stream: IO[str]) -> ProgressListener:
    return ProgressListener(1, stream=stream, live=False)


@pytest.mark.parametrize("narrator", [output, progress])
@pytest.mark.parametrize("in_the_middle", [True, False], ids=["a line is held up", "the last words are"])
def test_a_terminal_that_nobody_reads_holds_up_no_end(
    narrator: Callable[[IO[str]], OutputListener | ProgressListener],
    in_the_middle: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    terminal = Terminal()
    before = time.monotonic()
    with close_within_deadline(narrator(terminal)) as shown:
        for number in range(600):  # more than are shown of a worker at once
            shown.log(0, str(number))
        terminal.goes_on.clear()
        if in_the_middle:
            threading.Thread(target=shown.tell, args=("a loss",), daemon=True).start()
            assert terminal.held.wait(20)
    assert time.monotonic() - before < 10
    assert terminal.held.wait(20)
    terminal.goes_on.set()


def test_last_words_that_fail_are_not_the_jobs_end(caplog: pytest.LogCaptureFixture) -> None:
    class Closed:
        def close(self) -> None:
            raise ValueError("I/O operation on closed file")

    with close_within_deadline(Closed()):
        pass
    assert "closed file" in caplog.text
