"""What the workers of a `run` print, on one stream: the narrator that `launch` calls from several threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any

from spark_elastic.clock import Clock


class Output:
    """Lines prefixed with their rank, and with the time of day where wanted; one lock owns the stream."""

    def __init__(self, stream: IO[str], clock: Clock, timestamps: bool, worlds: bool, lines: bool) -> None:
        """worlds: tell of each new world. lines: show what workers print."""
        self._stream = stream
        self._clock = clock
        self._timestamps = timestamps
        self._worlds = worlds
        self._lines = lines
        self._lock = threading.Lock()

    def log(self, rank: int | None, line: str) -> None:
        if self._lines:
            self._say(f"[{'-' if rank is None else rank}] {line}")

    def progress(self, numbers: Mapping[str, Any]) -> None:
        """A function has no progress but what it prints."""

    def world(self, size: int, reason: str) -> None:
        """It is told with its cost, once it stands."""

    def tell(self, text: str) -> None:
        if self._worlds:
            self._say(text)

    def _say(self, text: str) -> None:
        if self._timestamps:
            text = f"{datetime.fromtimestamp(self._clock.wall()).astimezone().isoformat(timespec='seconds')} {text}"
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()
