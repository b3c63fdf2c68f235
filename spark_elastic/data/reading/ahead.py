"""Row groups decoded before they are asked for, by a thread of its own.

Owns that thread and how far it is ahead; what is decoded lies in the reader. With it one row group is decoded while
rows of others are gathered: Arrow and numpy both let go of the interpreter's lock for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType

from spark_elastic.data.reading.decoding import Decoded, Reader


class DecodeAhead:
    """Lies between a reader and the one thread that fetches, which enters and leaves it as a context."""

    def __init__(self, reader: Reader, most: int, answered: Callable[[], None]) -> None:
        """most: row groups that may lie decoded before they are fetched; with 0 there is no thread.

        answered: called for each row group that was read, by the thread that read it.
        """
        self._reader, self._most, self._answered = reader, most, answered
        self._changed = threading.Condition()
        self._wanted: dict[int, None] = {}  # in the order in which they will be fetched
        self._decoded: set[int] = set()  # of them
        self._releases = 0
        self._full = False  # no room for another, until something is released
        self._stopped = False
        self._thread = threading.Thread(target=self._decode, name="decode-ahead", daemon=True)

    def __enter__(self) -> DecodeAhead:
        if self._most:
            try:
                self._thread.start()
            except RuntimeError:  # the system has no thread to give: all is decoded by who fetches
                self._most = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the row group that the thread is at."""
        self.stop()
        if self._most:
            self._thread.join()

    def stop(self) -> None:
        """Nothing more is begun ahead; waits for nothing. Any thread may call it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def ask(self, groups: Iterable[int]) -> None:
        """They will be fetched soon, in this order."""
        if self._most:
            with self._changed:
                self._wanted.update(dict.fromkeys(groups))
                self._wake()

    def fetch(self, group: int) -> Decoded:
        """See `Reader.fetch`. What was not decoded ahead by now is decoded here."""
        if self._most:
            with self._changed:
                self._wanted.pop(group, None)
                self._decoded.discard(group)
                self._wake()
        decoded = self._reader.fetch(group)
        self._answered()
        return decoded

    def release(self, group: int) -> None:
        """See `Reader.release`."""
        self._reader.release(group)
        if self._most:
            with self._changed:
                self._releases += 1
                self._full = False
                self._wake()

    def _decode(self) -> None:
        # Where the store fails, who fetches meets the same, and is there to be told: the rest is left to it.
        with suppress(Exception):
            while (group := self._next()) is not None:
                releases = self._releases
                if self._reader.prefetch(group):
                    self._answered()
                else:
                    self._put_back(group, releases)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._may_go_on())
            if self._stopped:
                return None
            group = next(iter(self._wanted))
            del self._wanted[group]
            self._decoded.add(group)
            return group

    def _put_back(self, group: int, releases: int) -> None:
        """There was no room for it. releases: how many there had been before it was tried."""
        with self._changed:
            if group in self._decoded:  # and was not fetched meanwhile
                self._decoded.remove(group)
                self._wanted = {group: None, **self._wanted}
                self._full = self._releases == releases

    def _wake(self) -> None:
        # Woken for nothing, it would take the interpreter's lock from the thread that gathers.
        if self._may_go_on():
            self._changed.notify()

    def _may_go_on(self) -> bool:
        return bool(self._wanted) and not self._full and len(self._decoded) < self._most
