"""Row groups decoded before they are asked for, by a thread of its own.

Owns that thread and how far it is ahead; what is decoded lies in the reader. With it one row group is decoded while
rows of others are gathered: Arrow and numpy both let go of the interpreter's lock for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from spark_elastic.data.reading.reader import Decoded, Reader


class DecodeAhead:
    """Lies between a reader and the one thread that fetches. Its end waits for the row group that it is at."""

    def __init__(self, reader: Reader, most: int) -> None:
        """most: row groups that may lie decoded before they are fetched."""
        self._reader, self._most = reader, most
        self._changed = threading.Condition()
        self._wanted: dict[int, None] = {}  # in the order in which they will be fetched
        self._decoded: set[int] = set()  # of them
        self._full = False  # no room for another, until something is released
        self._closed = False
        self._thread = threading.Thread(target=self._decode, name="decode-ahead", daemon=True)

    def __enter__(self) -> DecodeAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def ask(self, groups: Iterable[int]) -> None:
        """They will be fetched soon, in this order."""
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
        return self._reader.fetch(group)

    def release(self, group: int) -> None:
        """See `Reader.release`."""
        self._reader.release(group)
        if self._full:
            with self._changed:
                self._full = False
                self._wake()

    def _decode(self) -> None:
        while (group := self._next()) is not None:
            with suppress(Exception):  # who fetches it meets the same, and is there to be told
                if not self._reader.prefetch(group):
                    self._put_back(group)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_go_on())
            if self._closed:
                return None
            group = next(iter(self._wanted))
            del self._wanted[group]
            self._decoded.add(group)
            return group

    def _wake(self) -> None:
        if (
            self._may_go_on()
        ):  # woken for nothing, it would take the interpreter's lock from the gathering thread
            self._changed.notify()

    def _may_go_on(self) -> bool:
        return bool(self._wanted) and not self._full and len(self._decoded) < self._most

    def _put_back(self, group: int) -> None:
        with self._changed:
            if group in self._decoded:  # and was not fetched meanwhile
                self._decoded.remove(group)
                self._wanted = {group: None, **self._wanted}
                self._full = True
