"""The log of spark_elastic where a job is watched: shown there for `verbose=2`, and passed on by a driver that runs
elsewhere; and who waits for the handlers of its users. The root logger is left as it is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Protocol, TypeAlias, TypeVar

# Tells people from a thread of its own, so that a terminal or a listener that blocks holds up nobody but itself.
#
# Bounded: where people are too slow, the newest sentences are dropped and counted; of progress the newest alone waits.
# `tell` and `progress` may be called from any thread and never block; what they are given is called in this thread.


log = logging.getLogger("spark_elastic")

MOST_WAITING = 10_000
CLOSE_SECONDS = 2.0
Words: TypeAlias = Callable[[], object]


class Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)


class AsyncNotifier:
    """What fails is logged, and harms nobody. A block of it starts it and ends it."""

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._changed = threading.Condition()  # guards the four below
        self._queue: deque[Words] = deque()
        self._newest: Words | None = None  # of progress; its turn is in `_queue`
        self._dropped = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spark-elastic-teller", daemon=True)

    def __enter__(self) -> AsyncNotifier:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_alive(self) -> bool:
        """Somebody tells what `tell` takes."""
        return self._thread.is_alive()

    def tell(self, words: Words) -> None:
        """Call it once all before it are over, or drop it."""
        with self._changed:
            if len(self._queue) >= self._most_waiting:
                self._dropped += 1
                return
            self._queue.append(words)
            self._changed.notify()

    def progress(self, words: Words) -> None:
        """The same; one that still waits gives its turn to the next."""
        with self._changed:
            if self._newest is None:
                self._queue.append(self._tell_newest)
                self._changed.notify()
            self._newest = words

    def close(self, within: float = CLOSE_SECONDS) -> None:
        """Tell what waits, for so many seconds at most; who blocks longer is left to itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(within)

    def _tell_newest(self) -> None:
        with self._changed:
            words, self._newest = self._newest, None
        if words is not None:
            words()

    def _run(self) -> None:
        while (words := self._next()) is not None:
            try:
                words()
            except Exception:
                log.exception("the narrator failed")

    def _next(self) -> Words | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            dropped, self._dropped = self._dropped, 0
            if not self._queue:
                return None
            words = self._queue.popleft()
        if dropped:
            log.warning("%d sentences were dropped: they came faster than they were read", dropped)
        return words


@contextmanager
def close_within_deadline(narrator: C) -> Iterator[C]:
    """`contextlib.closing` of who tells people: its last words may block, or fail, as all others; the block ends."""
    try:
        yield narrator
    finally:
        with AsyncNotifier() as teller:
            teller.tell(narrator.close)


LogEntry: TypeAlias = tuple[
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
def log_to_listener(tell: Callable[[str], None], wanted: bool = True) -> Iterator[None]:
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

    with AsyncNotifier() as teller, _taken(take):
        yield


def _say(tell: Callable[[str], None], text: str, record: logging.LogRecord) -> None:
    try:
        tell(text)
    except Exception:  # a stream that is closed; to log that would end here again
        logging.Handler().handleError(record)


@contextmanager
def log_to_stream(stream: IO[str]) -> Iterator[None]:
    """Inside the block all loggers' records are lines of `stream`; whoever logs does not wait for it."""
    shown, root = logging.StreamHandler(stream), logging.getLogger()
    shown.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    with AsyncNotifier() as teller:
        taker = _Taker(lambda record: teller.tell(lambda: shown.handle(record)))
        root.addHandler(taker)
        try:
            yield
        finally:
            root.removeHandler(taker)


@contextmanager
def forward_log(post: Callable[[LogEntry], None]) -> Iterator[None]:
    """Inside the block `post` gets all of it, as what `emit_forwarded` takes on the other side."""

    def take(record: logging.LogRecord) -> None:
        told = getattr(record, "told", False)
        post((record.levelno, record.name, logging.Formatter().format(record), told))

    with _taken(take):
        yield


def emit_forwarded(level: int, name: str, text: str, told: bool) -> None:
    """Log here what was logged elsewhere."""
    logging.getLogger(name).log(level, "%s", text, extra=TOLD if told else None)


@contextmanager
def isolate_log_handlers() -> Iterator[None]:
    """Inside the block a handler that blocks or fails holds up neither the driver nor its server: whatever a job's
    threads log is handed to handlers by a thread of its own."""
    with AsyncNotifier() as teller:
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

    def __init__(self, teller: AsyncNotifier) -> None:
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
