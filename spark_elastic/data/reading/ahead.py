"""Row groups decoded before they are asked for, by a thread of its own.

Owns that thread and the list of what it is to do; what is decoded lies in the reader. With it one row group is decoded
while rows of others are gathered: Arrow and numpy both let go of the interpreter's lock for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from spark_elastic.data.reading.reader import Decoded, Reader


class DecodeAhead:
    """Lies between a reader and the one thread that fetches. Its end waits for the row group that it is at."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._changed = threading.Condition()
        self._wanted: dict[int, None] = {}  # in the order in which they will be fetched
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
            self._changed.notify()

    def fetch(self, group: int) -> Decoded:
        """See `Reader.fetch`. What was not decoded ahead by now is decoded here."""
        with self._changed:
            self._wanted.pop(group, None)
        return self._reader.fetch(group)

    def _decode(self) -> None:
        while (group := self._next()) is not None:
            with suppress(Exception):  # who fetches it meets the same, and is there to be told
                self._reader.prefetch(group)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted)
            if self._closed:
                return None
            group = next(iter(self._wanted))
            del self._wanted[group]
            return group
