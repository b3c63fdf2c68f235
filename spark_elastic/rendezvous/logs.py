"""Hands workers' output on from a thread of its own, so that a terminal that blocks never holds up the server.

Bounded: when the reader is too slow, the newest lines are dropped and counted. `put` comes from the server's event
loop, the callback runs in this thread.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable

from spark_elastic.rendezvous.messages import LogLines

log = logging.getLogger("spark_elastic.rendezvous")

MOST_WAITING = 1024  # messages
CLOSE_SECONDS = 2.0


class LogPump:
    """Calls `deliver` with each message, in order."""

    def __init__(self, deliver: Callable[[LogLines], None], most_waiting: int = MOST_WAITING) -> None:
        self._deliver = deliver
        self._queue: queue.Queue[LogLines | None] = queue.Queue(most_waiting)
        self._dropped = 0  # lines, since the last message that was taken; written by `put` alone
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: LogLines) -> None:
        """Take a message or drop it; never blocks."""
        if self._dropped:
            note = f"[{self._dropped} lines were dropped: they came faster than they were read]"
            message = dataclasses.replace(message, lines=(note, *message.lines))
        try:
            self._queue.put_nowait(message)
            self._dropped = 0
        except queue.Full:
            self._dropped += len(message.lines) - (1 if self._dropped else 0)

    def close(self) -> None:
        """Deliver what waits, for CLOSE_SECONDS at most; a reader that blocks longer is left to itself."""
        self._closing.set()
        try:
            self._queue.put_nowait(None)  # wakes the thread; where there is no room it is awake already
        except queue.Full:
            pass
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            message = self._queue.get()
            if message is None:
                continue
            try:
                self._deliver(message)
            except Exception:  # a reader's defect must not end the stream
                log.exception("handing on the output of %s failed", message.worker)
