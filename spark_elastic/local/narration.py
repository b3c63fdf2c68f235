"""What workers of a local job print: on a stream, each line with its rank, and in files, `rank.N/stdout`.

Called from the driver's threads; one lock owns the stream and the files.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from spark_elastic.clock import Clock


class Narration:
    """`launch.Narrator`. folder: where files go, one folder a rank; None for none. verbose: tell of worlds, too."""

    def __init__(
        self,
        stream: IO[str],
        clock: Clock,
        timestamps: bool = False,
        folder: Path | None = None,
        verbose: bool = False,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._timestamps = timestamps
        self._folder = folder
        self._verbose = verbose
        self._files: dict[str, IO[str]] = {}
        self._lock = threading.Lock()

    def log(self, rank: int | None, line: str) -> None:
        who = "-" if rank is None else str(rank)
        with self._lock:
            self._write(f"[{who}] {line}")
            if self._folder is not None:
                file = self._file(who, self._folder)
                file.write(line + "\n")
                file.flush()

    def progress(self, numbers: Mapping[str, Any]) -> None:
        """A script has no progress but what it prints."""

    def world(self, size: int, reason: str) -> None:
        """It is told with its cost, once it stands."""

    def tell(self, text: str) -> None:
        if self._verbose:
            with self._lock:
                self._write(f"[driver] {text}")

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._folder = None

    def _write(self, text: str) -> None:
        if self._timestamps:
            text = f"{datetime.fromtimestamp(self._clock.wall()).astimezone().isoformat(timespec='seconds')} {text}"
        self._stream.write(text + "\n")
        self._stream.flush()

    def _file(self, who: str, folder: Path) -> IO[str]:
        """Workers outside a world write to `rank.none`."""
        if who not in self._files:
            path = folder / f"rank.{'none' if who == '-' else who}"
            path.mkdir(parents=True, exist_ok=True)
            self._files[who] = (path / "stdout").open("a", encoding="utf-8")
        return self._files[who]
