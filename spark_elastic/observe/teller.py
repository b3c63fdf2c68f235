"""Tells people from a thread of its own, so that a terminal or a listener that blocks holds up nobody but itself.

Bounded: where people are too slow, the newest sentences are dropped and counted; of progress the newest alone waits.
`tell` and `progress` may be called from any thread and never block; what they are given is called in this thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeAlias, TypeVar

log = logging.getLogger("spark_elastic")

MOST_WAITING = 10_000
CLOSE_SECONDS = 2.0
Words: TypeAlias = Callable[[], object]


class Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)


class Teller:
    """What fails is logged, and harms nobody. A block of it starts it and ends it."""

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._changed = threading.Condition()  # guards the four below
        self._queue: deque[Words] = deque()
        self._newest: Words | None = None  # of progress; its turn is in `_queue`
        self._dropped = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spark-elastic-teller", daemon=True)

    def __enter__(self) -> Teller:
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
def closing_in_time(narrator: C) -> Iterator[C]:
    """`contextlib.closing` of who tells people: its last words may block, or fail, as all others; the block ends."""
    try:
        yield narrator
    finally:
        with Teller() as teller:
            teller.tell(narrator.close)
