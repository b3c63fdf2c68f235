"""When each operation was asked for, agreed on and carried out, as a Chrome trace (chrome://tracing, Perfetto).

One row per name: QUEUE until the round that announced it, NEGOTIATE_x until all ranks had asked for it, then x itself;
and one per bucket of an optimizer's gradients, which nobody negotiates.
Channels write from their threads; a lock guards the file. What is there can be read after a crash: the format lets the
closing bracket be missing. A file that can be written no more ends there; training goes on.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.operation import Operation

log = logging.getLogger(__name__)


class Timeline:
    """An open trace file. mark_cycles: each round is marked, too. goes_on: append to what the file has already."""

    def __init__(self, path: str, mark_cycles: bool = False, goes_on: bool = False) -> None:
        try:
            mode = "a" if goes_on else "w"
            self._file = open(path, mode, encoding="utf-8", buffering=1)  # noqa: SIM115 - lives until close()
        except OSError as error:
            raise InvalidInput(f"the timeline {path!r} cannot be written: {error}.") from error
        self._mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        if self._file.tell() == 0:
            self._put("[")

    def operation(self, operation: Operation, begin: float, end: float) -> None:
        """One that was carried out between `begin` and `end`, seconds by the clock that its handle has."""
        kind = operation.request.kind.upper()
        self._spans(
            operation.label,
            ("QUEUE", operation.requested_at, operation.announced_at),
            (f"NEGOTIATE_{kind}", operation.announced_at, begin),
            (kind, begin, end),
        )

    def gradients(self, label: str, nbytes: int, complete: float, begin: float, end: float) -> None:
        """Of one bucket of an optimizer: there at `complete`, exchanged between `begin` and `end`."""
        self._spans(label, ("QUEUE", complete, begin), ("ALLREDUCE", begin, end), bytes=nbytes)

    def _spans(self, label: str, *spans: tuple[str, float, float], **details: int) -> None:
        with self._lock:
            row = self._row(label)
            for name, first, last in spans:
                event = {
                    "name": name,
                    "ph": "X",
                    "ts": first * 1e6,
                    "dur": max(0.0, last - first) * 1e6,
                    "pid": row,
                }
                self._write({**event, "args": details} if details else event)

    def cycle(self, now: float) -> None:
        """A round began."""
        if self._mark_cycles:
            with self._lock:
                self._write({"name": "CYCLE_START", "ph": "i", "ts": now * 1e6, "pid": 0, "s": "g"})

    def close(self) -> None:
        """Complete the file; what comes later is dropped."""
        with self._lock:
            self._put("{}]\n", last=True)

    def _row(self, label: str) -> int:
        if label not in self._rows:
            self._rows[label] = len(self._rows) + 1
            self._write(
                {"name": "process_name", "ph": "M", "pid": self._rows[label], "args": {"name": label}}
            )
        return self._rows[label]

    def _write(self, event: Mapping[str, Any]) -> None:
        self._put(json.dumps(event) + ",\n")

    def _put(self, text: str, last: bool = False) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(text)
            if last:
                self._file.close()
        except OSError as error:  # a full disk must not end the world
            log.warning("the timeline %s ends here: %s", self._file.name, error)
            with suppress(OSError):  # it tries once more to write that text
                self._file.close()
