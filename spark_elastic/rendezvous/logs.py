"""Hands workers' output on from a thread of its own, so that a terminal that blocks never holds up the server.

Bounded: when the reader is too slow, the newest lines are dropped and counted. `put` comes from the server's event
loop, the callback runs in this thread.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable

from spark_elastic.rendezvous.messages import LogLines

log = logging.getLogger("spark_elastic.rendezvous")

MOST_WAITING = 16 << 20  # characters
CLOSE_SECONDS = 2.0


class LogPump:
    """Calls `deliver` with each message, in order. most_waiting: characters of lines not delivered yet."""

    def __init__(self, deliver: Callable[[LogLines], None], most_waiting: int = MOST_WAITING) -> None:
        self._deliver = deliver
        self._most_waiting = most_waiting
        self._changed = threading.Condition()  # guards the four below
        self._queue: deque[LogLines] = deque()
        self._waiting = 0  # characters in `_queue`
        self._dropped = 0  # lines since the last one that was taken
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spark-elastic-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: LogLines) -> None:
        """Take a message or drop it; never blocks."""
        size = _size(message)
        with self._changed:
            if self._waiting + size > self._most_waiting:
                self._dropped += len(message.lines)
                return
            if self._dropped:
                note = f"[{self._dropped} lines were dropped: they came faster than they were read]"
                message = dataclasses.replace(message, lines=(note, *message.lines))
                self._dropped = 0
            self._queue.append(message)
            self._waiting += _size(message)
            self._changed.notify()

    def close(self) -> None:
        """Deliver what waits, for CLOSE_SECONDS at most; a reader that blocks longer is left to itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (message := self._next()) is not None:
            try:
                self._deliver(message)
            except Exception:  # a reader's defect must not end the stream
                log.exception("handing on the output of %s failed", message.worker)

    def _next(self) -> LogLines | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            message = self._queue.popleft()
            self._waiting -= _size(message)
            return message


def _size(message: LogLines) -> int:
    return sum(map(len, message.lines))
