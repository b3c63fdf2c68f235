"""What workers of a function or script print, on one stream: a narrator, called from several threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any

from spark_elastic.clock import Clock
from spark_elastic.observe.curve import Speed
from spark_elastic.observe.line_limit import LineLimit
from spark_elastic.observe.progress import PLAIN_EVERY, figures

log = logging.getLogger("spark_elastic")

COUNTED = {"step", "world"}  # of each job


class Output:
    """Lines prefixed with their rank, and with the time of day where wanted; one lock owns the stream."""

    def __init__(
        self,
        stream: IO[str],
        clock: Clock,
        timestamps: bool,
        worlds: bool,
        lines: bool,
        limit: LineLimit | None = None,
    ) -> None:
        """worlds: tell of each new world. lines: show what workers print. limit: of their lines, None for all."""
        self._stream = stream
        self._clock = clock
        self._timestamps = timestamps
        self._worlds = worlds
        self._lines = lines
        self._limit = limit
        self._pending: Mapping[str, Any] | None = None
        self._next_line = 0.0
        self._nobody_reads = False  # the pipe's other end was closed, as by `head`
        self._lock = threading.Lock()

    def log(self, rank: int | None, line: str) -> None:
        if not self._lines:
            return
        who = "-" if rank is None else str(rank)
        with self._lock:
            for shown in (
                (line,) if self._limit is None else self._limit.pass_on(self._clock.now(), who, line)
            ):
                self._write(f"[{who}] {shown}")

    def progress(self, numbers: Mapping[str, Any]) -> None:
        """What it reports by itself; commits alone are no news."""
        if not self._worlds or not (numbers.keys() - COUNTED):
            return
        with self._lock:
            self._pending = numbers
            if self._clock.now() >= self._next_line:
                self._next_line = self._clock.now() + PLAIN_EVERY
                self._show()

    def world(self, size: int, reason: str) -> None:
        """It is told with its cost, once it stands."""

    def tell(self, text: str) -> None:
        if self._worlds:
            with self._lock:
                self._write(text)

    def close(self) -> None:
        """Say what was left out last."""
        with self._lock:
            self._show()
            for who, count in () if self._limit is None else self._limit.left_out():
                self._write(f"[{who}] {count} lines were left out")

    def _show(self) -> None:
        numbers, self._pending = self._pending, None
        if numbers is not None:
            step = f"step {numbers['step']} " if "step" in numbers else ""
            self._write(f"{step}{figures(numbers, Speed())}")

    def _write(self, text: str) -> None:
        if self._timestamps:
            text = f"{datetime.fromtimestamp(self._clock.wall()).astimezone().isoformat(timespec='seconds')} {text}"
        if self._nobody_reads:
            return
        try:
            self._stream.write(_writable(text, self._stream) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            self._nobody_reads = True
            log.warning("nobody reads what workers print any more; the job goes on")


def _writable(text: str, stream: IO[str]) -> str:
    """What the stream's encoding lacks is told by its number."""
    encoding = getattr(stream, "encoding", None)
    return text if encoding is None else text.encode(encoding, "backslashreplace").decode(encoding)
