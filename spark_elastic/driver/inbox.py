"""The one queue between everybody and the driver loop. Any thread puts, the loop's alone takes.

Beats need no answer and are most of what comes: they wait for the next other event, or the loop's next tick. Each
waking of the loop's thread costs the server's thread the interpreter, more than the rest of a beat costs it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque

from spark_elastic.protocol.events import DriverEvent, SlotBeat


class Inbox:
    """Events in the order in which they came; None ends the loop."""

    def __init__(self) -> None:
        self._events: deque[DriverEvent | None] = deque()
        self._bell = threading.Event()

    def put(self, event: DriverEvent | None) -> None:
        """Never blocks."""
        self._events.append(event)
        if not isinstance(event, SlotBeat):
            self._bell.set()

    def get(self, timeout: float) -> DriverEvent | None:
        """The oldest event; waits up to `timeout` seconds for one that is no beat.

        Raises:
            queue.Empty: there is none.
        """
        self._bell.clear()
        if not self._events:
            self._bell.wait(timeout)
        if not self._events:
            raise queue.Empty
        return self._events.popleft()
