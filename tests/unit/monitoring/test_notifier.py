"""A separate thread calls listeners in order; one that blocks costs notifications, never the callers time."""

from __future__ import annotations

import io
import logging
import threading
import time
from functools import partial

import pytest

from spark_elastic.monitoring import listener as module
from spark_elastic.monitoring.console import ProgressListener
from spark_elastic.monitoring.listener import AsyncNotifier, JobListener, close_within_deadline


def test_only_the_newest_progress_report_waits_and_dropped_notifications_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[object] = []
    taken, free = threading.Event(), threading.Event()
    with AsyncNotifier(max_pending=2) as notifier:
        notifier.submit(lambda: (taken.set(), free.wait(20)))
        assert taken.wait(20)
        notifier.submit(partial(calls.append, "first"))
        for number in range(1000):
            notifier.submit_latest(partial(calls.append, number))
        for _ in range(2):
            notifier.submit(partial(calls.append, "dropped"), size=2)
        free.set()
    assert calls == ["first", 999]
    (record,) = caplog.records
    assert record.getMessage() == "2 notifications were dropped: the job listener is too slow"


def test_a_listener_that_fails_is_logged_and_still_called(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    with AsyncNotifier() as notifier:
        notifier.submit(lambda: 1 / 0)
        notifier.submit_latest(lambda: 1 / 0)
        notifier.submit_latest(partial(calls.append, "on"))
        notifier.submit(partial(calls.append, "and on"))
    assert calls == ["on", "and on"]
    assert {record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR} <= {
        "the job listener failed"
    }


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


@pytest.mark.parametrize("in_the_middle", [True, False], ids=["a line is held up", "the last words are"])
def test_a_terminal_that_blocks_does_not_hold_up_the_end_of_a_job(
    in_the_middle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    terminal = Terminal()
    before = time.monotonic()
    with close_within_deadline(ProgressListener(1, stream=terminal, live=False)) as shown:
        for number in range(600):  # more than are shown of a worker at once
            shown.on_output("", 0, str(number))
        terminal.goes_on.clear()
        if in_the_middle:
            threading.Thread(target=shown.on_message, args=("a loss",), daemon=True).start()
            assert terminal.held.wait(20)
    assert time.monotonic() - before < 10
    assert terminal.held.wait(20)
    terminal.goes_on.set()


def test_a_listener_whose_close_fails_does_not_fail_the_job(caplog: pytest.LogCaptureFixture) -> None:
    class ClosedStream(JobListener):
        def close(self) -> None:
            raise ValueError("I/O operation on closed file")

    with close_within_deadline(ClosedStream()):
        pass
    assert "closed file" in caplog.text
