"""The log where the job is watched, what workers print, in parts in the store, and the thread that calls listeners."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import pytest

from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.monitoring import listener as module
from spark_elastic.monitoring import logs
from spark_elastic.monitoring.console import ProgressListener
from spark_elastic.monitoring.listener import AsyncNotifier, JobListener, close_within_deadline
from spark_elastic.monitoring.logs import (
    ANNOUNCED,
    JOB_LOGGERS,
    MAX_PENDING_PARTS,
    LogEntry,
    StoreLog,
    emit_forwarded,
    forward_log,
    isolate_log_handlers,
    log_to_listener,
    log_to_stream,
)
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


def test_the_listener_gets_the_log_inside_the_block_only() -> None:
    messages: list[str] = []
    logger, root = logging.getLogger("spark_elastic"), logging.getLogger()
    before = list(logger.handlers), logger.level, list(root.handlers), root.level
    with log_to_listener(messages.append):
        logging.getLogger("spark_elastic.driver").info("a %s", "decision")
        logging.getLogger("spark_elastic.driver").debug("a detail")
        logger.warning("a worry")
        logger.info("told anyway", extra=ANNOUNCED)
        assert (list(root.handlers), root.level) == before[2:]
    logger.warning("after")
    assert messages == ["info: a decision", "warning: a worry"]
    assert (list(logger.handlers), logger.level, list(root.handlers), root.level) == before
    with log_to_listener(messages.append, enabled=False):
        logger.warning("not wanted")
    assert len(messages) == 2


def test_the_end_of_one_job_leaves_the_log_to_the_other() -> None:
    logger = logging.getLogger("spark_elastic")
    before, messages = logger.level, list[str]()
    first, second = log_to_listener(lambda text: None), log_to_listener(messages.append)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    logger.info("continues")
    second.__exit__(None, None, None)
    assert messages == ["info: continues"]
    assert logger.level == before


def test_the_log_goes_to_the_stream_inside_the_block_only() -> None:
    stream, root = io.StringIO(), logging.getLogger()
    before = list(root.handlers)
    with log_to_stream(stream, announced=False):
        logging.getLogger("spark_elastic").warning("a listener shows it", extra=ANNOUNCED)
        logging.getLogger("spark_elastic").warning("a %s", "worry")
        logging.getLogger("another").error("an error")
    logging.getLogger("spark_elastic").warning("after")
    assert stream.getvalue() == "WARNING:spark_elastic:a worry\nERROR:another:an error\n"
    assert root.handlers == before


def test_the_log_of_a_driver_in_another_process_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    passed: list[LogEntry] = []
    with forward_log(passed.append):
        logging.getLogger("spark_elastic.driver").warning("rank %d keeps others waiting", 1)
        logging.getLogger("spark_elastic").info("told anyway", extra=ANNOUNCED)
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("spark_elastic").exception("it failed")
    assert logging.getLogger("spark_elastic").level == logging.NOTSET
    caplog.clear()
    messages: list[str] = []
    with log_to_listener(messages.append):
        for record in passed:
            emit_forwarded(record)
    again = [f"{record.levelname} {record.name}" for record in caplog.records]
    assert again == ["WARNING spark_elastic.driver", "INFO spark_elastic", "ERROR spark_elastic"]
    first, second = messages
    assert first == "warning: rank 1 keeps others waiting"
    assert "ValueError: why" in second


@contextmanager
def add_handler(act: Callable[[str], object]) -> Iterator[None]:
    """A user's own, on the root logger."""
    root, handler = logging.getLogger(), logging.Handler()
    handler.emit = lambda record: act(record.getMessage())  # type: ignore[method-assign, assignment]
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


@pytest.mark.parametrize("name", ["spark_elastic.driver", "asyncio"])
def test_a_handler_that_blocks_does_not_hold_up_logging(name: str) -> None:
    seen: list[str] = []
    read = threading.Event()
    own = logging.getLogger(name)

    def blocks(text: str) -> None:
        assert read.wait(20)
        seen.append(text)

    with add_handler(blocks):
        with isolate_log_handlers():
            own.warning("a %s", "worry")
            own.warning("another")
            assert seen == []
            read.set()
        assert seen == ["a worry", "another"]
        own.warning("after")
        assert seen == ["a worry", "another", "after"], "whoever logs waits for handlers as ever"
    assert not any(logging.getLogger(logger).filters for logger in (*JOB_LOGGERS, name))


def test_a_handler_that_raises_does_not_fail_the_code_that_logs(capsys: pytest.CaptureFixture[str]) -> None:
    fail = Mock(side_effect=ConnectionError("no collector of logs"))
    with add_handler(fail), isolate_log_handlers():
        logging.getLogger("spark_elastic.driver").warning("a worry")
    assert capsys.readouterr().err.count("--- Logging error ---") == 1


def test_handlers_stay_isolated_when_another_job_of_the_process_ends() -> None:
    seen: list[str] = []
    with add_handler(seen.append):
        first, second = isolate_log_handlers(), isolate_log_handlers()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        logging.getLogger("spark_elastic").warning("continues")
        second.__exit__(None, None, None)
    assert seen == ["continues"]


def test_a_fork_of_the_driver_handles_its_own_log() -> None:
    reader, writer = os.pipe()
    with add_handler(lambda text: os.write(writer, text.encode())), isolate_log_handlers():
        if (child := os.fork()) == 0:
            logging.getLogger("spark_elastic").warning("from the child")
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
    with os.fdopen(reader) as text:
        assert text.read() == "from the child"


def test_warnings_of_a_process_without_configured_logging_have_the_form_of_sparks_log() -> None:
    program = (
        "import logging\n"
        "from spark_elastic.monitoring.logs import isolate_log_handlers\n"
        "log = logging.getLogger('spark_elastic.driver')\n"
        "with isolate_log_handlers():\n"
        "    log.warning('a %s', 'worry')\n"
        "    log.info('no worry')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"../../.. ..:..:.. WARN spark_elastic: a worry\n", done.stderr)


def _read_logs(store: Store) -> list[tuple[str, str]]:
    return [(part.name, store.read_bytes(part.name).decode()) for part in store.find("runs/r/logs")]


def test_each_kept_line_has_time_worker_and_rank() -> None:
    store = make_memory_store()
    files = StoreLog(store, "r", 3, 1 << 20, FakeClock(wall=0.25))
    files.on_output("", None, "importing")
    files._write()
    files.on_output("0-0.1", 1, "two caf\udce9")
    files.start()
    files.close()
    when = "1970-01-01T00:00:00.250+00:00"  # of a growing part, which is one object
    lines = f"{when} - [-] importing\n{when} 0-0.1 [1] two caf?\n"
    assert _read_logs(store) == [("runs/r/logs/000003-000001.log", lines)]


def test_the_oldest_parts_are_deleted_and_the_newest_are_kept() -> None:
    store = make_memory_store()
    files = StoreLog(store, "r", 1, 4000, FakeClock())
    for number in range(200):
        files.on_output("0-0.1", 0, f"line {number}.")
        files._write()
    files.start()
    files.close()
    names, texts = zip(*_read_logs(store), strict=True)
    assert sum(map(len, texts)) <= 4000
    assert "line 199." in texts[-1]
    assert "line 0." not in "".join(texts)
    assert "".join(texts).count("line") >= 40, "the newest fill what there is room for"
    assert names == tuple(sorted(names))


def test_lines_that_found_no_room_last_are_counted_at_the_end() -> None:
    store = make_memory_store()
    files = StoreLog(store, "r", 1, 4000, FakeClock())
    for number in range(MAX_PENDING_PARTS + 3):
        files.on_output("0-0.1", 0, f"{number} {'x' * 1000}")
    files.start()
    files.close()
    assert _read_logs(store)[-1][1].endswith(" - [-] 3 lines are missing: the store was too slow\n")


@pytest.mark.parametrize("error", [StoreError("The store is away."), MemoryError()])
def test_a_store_that_fails_costs_one_warning_and_then_lines(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What finds no room in memory is counted, and told once the store is back."""
    store, working = make_memory_store(), False
    write = Store.write_bytes

    def write_or_fail(self: Store, name: str, data: bytes) -> None:
        if not working:
            raise error
        write(self, name, data)

    monkeypatch.setattr(Store, "write_bytes", write_or_fail)
    monkeypatch.setattr(logs, "WRITE_INTERVAL", 0.001)
    files = StoreLog(store, "r", 1, 400, FakeClock())
    for number in range(30):
        files.on_output("0-0.1", 0, f"{number} {'x' * 100}")
    with pytest.raises(type(error)):
        files._write()
    working = True
    files._write()
    files.on_output("0-0.1", 0, "back")
    files.start()
    files.close()
    assert " lines are missing: the store was too slow\n" in _read_logs(store)[-1][1]
    working = False
    for _ in range(2):
        files = StoreLog(store, "r", 1, 400, FakeClock())
        files.on_output("0-0.1", 0, "lost")
        files.start()
        files.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


# ---- a separate thread calls listeners in order; one that blocks costs notifications, never the callers time


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
