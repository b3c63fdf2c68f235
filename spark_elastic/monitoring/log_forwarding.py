"""Where the log of spark_elastic goes while a job runs: to its listener, to a stream, or to a driver's client.

A thread that logs never waits for a handler: an `AsyncNotifier` delivers the records. The root logger and its level
stay as they are.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import IO

from spark_elastic.monitoring.listener import AsyncNotifier

log = logging.getLogger("spark_elastic")

ANNOUNCED = {"announced": True}  # `extra` of records that the job's listener also gets as a message
JOB_LOGGERS = ("spark_elastic", "asyncio", "py4j")  # a job's threads log to them and to loggers below them


def format_as_spark(wall: float, level: int, text: str) -> str:
    """A line in the form of Spark's own log."""
    name = {logging.WARNING: "WARN"}.get(level, logging.getLevelName(level))
    return f"{datetime.fromtimestamp(wall):%y/%m/%d %H:%M:%S} {name} spark_elastic: {text}"


@dataclass(frozen=True)
class LogEntry:
    """A log record on its way to another process."""

    level: int  # of `logging`
    logger: str  # name
    text: str  # formatted, without level and time
    announced: bool  # as `ANNOUNCED`


# Of the job that the calling thread prepares or runs.
_on_phase: ContextVar[Callable[[str], None] | None] = ContextVar("on_phase", default=None)


def announce_phase(text: str) -> None:
    """Tell people what a job does before it has workers: in the log, and by the listener of the caller's job."""
    log.info("%s", text, extra=ANNOUNCED)
    on_phase = _on_phase.get()
    if on_phase is not None:
        with AsyncNotifier() as notifier:  # a terminal that blocks must not delay the job
            notifier.submit(lambda: on_phase(text))


@contextmanager
def log_to_listener(on_message: Callable[[str], None], enabled: bool = True) -> Iterator[None]:
    """Pass what "spark_elastic" and loggers below it log, from INFO on, to a listener.

    Args:
        on_message: runs on a thread of its own.
        enabled: False passes what `announce_phase` says, and nothing else.
    """
    token = _on_phase.set(on_message)
    try:
        with _pass_records(on_message) if enabled else nullcontext():
            yield
    finally:
        _on_phase.reset(token)


@contextmanager
def _pass_records(on_message: Callable[[str], None]) -> Iterator[None]:

    def deliver(record: logging.LogRecord) -> None:
        if not getattr(record, "announced", False):
            on_message(f"{record.levelname.lower()}: {record.getMessage()}")

    with _start_handler(deliver) as handler, _info_level, _attach(handler, "spark_elastic"):
        yield


@contextmanager
def log_to_stream(stream: IO[str], announced: bool = True) -> Iterator[None]:
    """Write the records of all loggers to `stream`.

    Args:
        announced: also those that the job's listener gets as messages.
    """
    writer = logging.StreamHandler(stream)
    writer.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    if not announced:
        writer.addFilter(lambda record: not getattr(record, "announced", False))
    with _start_handler(writer.handle) as handler, _attach(handler, ""):
        yield


@contextmanager
def forward_log(post: Callable[[LogEntry], None]) -> Iterator[None]:
    """Post what "spark_elastic" and loggers below it log, from INFO on, for `emit_forwarded` in another process.

    Args:
        post: must not block; runs on the thread that logs.
    """

    class Poster(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            announced = getattr(record, "announced", False)
            post(LogEntry(record.levelno, record.name, logging.Formatter().format(record), announced))

    with _info_level, _attach(Poster(), "spark_elastic"):
        yield


def emit_forwarded(entry: LogEntry) -> None:
    """Log in this process what was logged in another one."""
    extra = ANNOUNCED if entry.announced else None
    logging.getLogger(entry.logger).log(entry.level, "%s", entry.text, extra=extra)


@contextmanager
def isolate_log_handlers() -> Iterator[None]:
    """Let a separate thread call the handlers of everything that a job's threads log.

    So a handler that blocks or fails holds up neither the driver nor its server. Where nobody has configured logging,
    warnings go to standard error in the form of Spark's log, which then is around them.
    """
    with _start_handler(_call_handlers) as handler:

        def divert(record: logging.LogRecord) -> bool:
            """The last filter of a logger: puts each record into the queue instead of letting it through."""
            if not handler.notifier.is_alive():  # in a fork of this process
                return True
            handler.emit(record)
            return False

        names = [name for name in list(logging.root.manager.loggerDict) if name.split(".")[0] in JOB_LOGGERS]
        loggers = [logging.getLogger(name) for name in names]
        for logger in loggers:
            logger.addFilter(divert)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(divert)


def _call_handlers(record: logging.LogRecord) -> None:
    logger = logging.getLogger(record.name)
    if logger.hasHandlers():
        logger.callHandlers(record)
    elif record.levelno >= logging.WARNING:
        text = logging.Formatter().format(record)
        sys.stderr.write(format_as_spark(record.created, record.levelno, text) + "\n")


class _AsyncHandler(logging.Handler):
    """Lets a notifier's thread deliver the records.

    Args:
        deliver: what it raises is reported like a failing handler, never logged, since that would come here again.
    """

    def __init__(self, deliver: Callable[[logging.LogRecord], object], notifier: AsyncNotifier) -> None:
        super().__init__()
        self._deliver = deliver
        self.notifier = notifier

    def emit(self, record: logging.LogRecord) -> None:
        self.notifier.submit(lambda: self._try(record))

    def _try(self, record: logging.LogRecord) -> None:
        try:
            self._deliver(record)
        except Exception:
            self.handleError(record)


@contextmanager
def _start_handler(deliver: Callable[[logging.LogRecord], object]) -> Iterator[_AsyncHandler]:
    """A handler that blocks no thread that logs, and at the end is abandoned if `deliver` blocks."""
    with AsyncNotifier(overflow="%d log records were dropped: their handlers are too slow") as notifier:
        yield _AsyncHandler(deliver, notifier)


class _InfoLevel:
    """Keeps the level of "spark_elastic" at INFO or below while any job of this process reads its log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next two
        self._readers = 0
        self._previous_level = logging.NOTSET

    def __enter__(self) -> None:
        logger = logging.getLogger("spark_elastic")
        with self._lock:
            if not self._readers:
                self._previous_level = logger.level
            self._readers += 1
            if logger.getEffectiveLevel() > logging.INFO:
                logger.setLevel(logging.INFO)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers:
                logging.getLogger("spark_elastic").setLevel(self._previous_level)


_info_level = _InfoLevel()  # of all jobs of this process


@contextmanager
def _attach(handler: logging.Handler, name: str) -> Iterator[None]:
    """name: of the logger; "": the root logger."""
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
