"""The log of spark_elastic where a job is watched: shown there for `verbose=2`, and passed on by a driver that runs
elsewhere; and who waits for the handlers of its users. The root logger is left as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TypeAlias

from spark_elastic.observe.teller import Teller

Passed: TypeAlias = tuple[
    int, str, str, bool
]  # level, logger, text, and whether those who watch are told anyway
TOLD = {"told": True}  # `extra` of records that those who watch are told anyway
OF_JOBS = (
    "spark_elastic",
    "uvicorn",
    "asyncio",
    "py4j",
)  # loggers to which a job's threads log, here and below


class _Taker(logging.Handler):
    def __init__(self, take: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(record)
        except Exception:  # whoever logs must not suffer from a stream that is closed
            self.handleError(record)


@contextmanager
def log_told(tell: Callable[[str], None], wanted: bool = True) -> Iterator[None]:
    """Inside the block `tell` gets what "spark_elastic" and the loggers below it say, from INFO on; whoever logs does
    not wait for it.

    wanted: False changes nothing.
    """
    if not wanted:
        yield
        return

    def take(record: logging.LogRecord) -> None:
        if not getattr(record, "told", False):
            text = f"{record.levelname.lower()}: {record.getMessage()}"
            teller.tell(lambda: _say(tell, text, record))

    with Teller() as teller, _taken(take):
        yield


def _say(tell: Callable[[str], None], text: str, record: logging.LogRecord) -> None:
    try:
        tell(text)
    except Exception:  # a stream that is closed; to log that would end here again
        logging.Handler().handleError(record)


@contextmanager
def log_shown(stream: IO[str]) -> Iterator[None]:
    """Inside the block all loggers' records are lines of `stream`; whoever logs does not wait for it."""
    shown, root = logging.StreamHandler(stream), logging.getLogger()
    shown.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    with Teller() as teller:
        taker = _Taker(lambda record: teller.tell(lambda: shown.handle(record)))
        root.addHandler(taker)
        try:
            yield
        finally:
            root.removeHandler(taker)


@contextmanager
def log_passed_on(post: Callable[[Passed], None]) -> Iterator[None]:
    """Inside the block `post` gets all of it, as what `log_again` takes on the other side."""

    def take(record: logging.LogRecord) -> None:
        told = getattr(record, "told", False)
        post((record.levelno, record.name, logging.Formatter().format(record), told))

    with _taken(take):
        yield


def log_again(level: int, name: str, text: str, told: bool) -> None:
    """Log here what was logged elsewhere."""
    logging.getLogger(name).log(level, "%s", text, extra=TOLD if told else None)


@contextmanager
def log_aside() -> Iterator[None]:
    """Inside the block a handler that blocks or fails holds up neither the driver nor its server: whatever a job's
    threads log is handed to handlers by a thread of its own."""
    with Teller() as teller:
        aside = _Aside(teller)
        known = [name for name in list(logging.root.manager.loggerDict) if name.split(".")[0] in OF_JOBS]
        loggers = [logging.getLogger(name) for name in known]
        for logger in loggers:
            logger.addFilter(aside)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(aside)


class _Aside(logging.Filter):
    """A logger's last filter: lets no record through, and has it handled elsewhere."""

    def __init__(self, teller: Teller) -> None:
        super().__init__()
        self._teller = teller

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._teller.is_alive():  # in a fork of this process
            return True
        self._teller.tell(lambda: _handle(record))
        return False


def _handle(record: logging.LogRecord) -> None:
    try:
        logging.getLogger(record.name).callHandlers(record)
    except Exception:  # to log that would end here again
        logging.Handler().handleError(record)


class _Lowered:
    """The level of "spark_elastic" while anybody takes its log; afterwards it is as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # owns the two below
        self._takers = 0
        self._before = logging.NOTSET

    def __enter__(self) -> None:
        logger = logging.getLogger("spark_elastic")
        with self._lock:
            if not self._takers:
                self._before = logger.level
            self._takers += 1
            if logger.getEffectiveLevel() > logging.INFO:
                logger.setLevel(logging.INFO)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._takers -= 1
            if not self._takers:
                logging.getLogger("spark_elastic").setLevel(self._before)


_lowered = _Lowered()  # of all jobs of this process


@contextmanager
def _taken(take: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    logger, taker = logging.getLogger("spark_elastic"), _Taker(take)
    with _lowered:
        logger.addHandler(taker)
        try:
            yield
        finally:
            logger.removeHandler(taker)
