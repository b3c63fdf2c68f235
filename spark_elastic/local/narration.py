"""What workers of a local job print: as of any job, and in files, `rank.N/stdout`, whole.

Called from the driver's threads; one lock owns the files.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from spark_elastic.observe.output import Output


class Narration:
    """`launch.Narrator`. shown: on the screen. folder: where files go, one folder a rank; None for none."""

    def __init__(self, shown: Output, folder: Path | None = None) -> None:
        self._shown = shown
        self._folder = folder
        self._files: dict[str, IO[str]] = {}
        self._lock = threading.Lock()

    def log(self, rank: int | None, line: str) -> None:
        self._shown.log(rank, line)
        with self._lock:
            if self._folder is not None:
                file = self._file("none" if rank is None else str(rank), self._folder)
                file.write(line + "\n")
                file.flush()

    def progress(self, numbers: Mapping[str, Any]) -> None:
        self._shown.progress(numbers)

    def world(self, size: int, reason: str) -> None:
        """It is told with its cost, once it stands."""

    def tell(self, text: str) -> None:
        self._shown.tell(f"[driver] {text}")

    def close(self) -> None:
        self._shown.close()
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._folder = None

    def _file(self, who: str, folder: Path) -> IO[str]:
        """Workers outside a world write to `rank.none`."""
        if who not in self._files:
            path = folder / f"rank.{who}"
            path.mkdir(parents=True, exist_ok=True)
            self._files[who] = (path / "stdout").open("a", encoding="utf-8")
        return self._files[who]
