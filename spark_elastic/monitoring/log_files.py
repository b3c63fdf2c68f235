"""What workers print, kept in files: in the run's store, or in one local folder per rank."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.monitoring.console import OutputListener
from spark_elastic.monitoring.listener import JobListener

log = logging.getLogger("spark_elastic")

PART_BYTES = 1 << 20
WRITE_INTERVAL = 10.0  # seconds
MAX_PENDING_PARTS = 8  # in memory while the store is slow
CLOSE_SECONDS = 30.0  # how long closing waits for the store


def save_status(store: Store, run_id: str, attempt: int, page: str) -> None:
    """Keep the last status page of an attempt with its run; a store that fails costs the page and one warning."""
    name = f"runs/{run_id}/status/{attempt:06d}.html"
    try:
        store.write_bytes(name, page.encode())
    except StoreError as error:
        log.warning("the status page is not kept with the run: %s", error)


class StoreLog(JobListener):
    """Keeps all output in the run's store: `runs/RUN/logs/ATTEMPT-PART.log`, with time, worker and rank in each line.

    A thread of its own writes every `WRITE_INTERVAL` seconds. Since object stores cannot append, it writes the newest
    part again while that grows. It deletes the oldest parts. A store that fails costs lines and one warning.
    All workers share the files, so that the number of objects does not grow with the number of workers.

    Args:
        max_bytes: of this attempt's files together; one part more may exist for a moment.
    """

    def __init__(self, store: Store, run_id: str, attempt: int, max_bytes: int, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._prefix = f"runs/{run_id}/logs/{attempt:06d}"
        self._max_bytes = max_bytes
        self._part_bytes = min(PART_BYTES, max(1, max_bytes // 4))
        self._lock = threading.Lock()  # guards the next two
        self._parts: list[bytearray] = [bytearray()]  # incomplete or not written yet; the last one grows
        self._dropped = 0  # lines
        # Only the writing thread uses the following.
        self._number = 1  # of the first of `_parts`
        # Names and bytes of complete parts in the store, oldest first.
        self._complete: list[tuple[str, int]] = []
        self._written = 0  # bytes of the first of `_parts` that are in the store
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-store-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        """Never blocks."""
        when = self._format_time()
        text = f"{when} {worker or '-'} [{'-' if rank is None else rank}] {line}\n"
        with self._lock:
            if len(self._parts) > MAX_PENDING_PARTS:
                self._dropped += 1
                return
            self._note_dropped(when)
            part = self._parts[-1]
            part += text.encode("utf-8", "replace")
            if len(part) >= self._part_bytes:
                self._parts.append(bytearray())

    def close(self) -> None:
        """Writes the rest; waits for the store for `CLOSE_SECONDS` at most."""
        with self._lock:
            self._note_dropped(self._format_time())
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _format_time(self) -> str:
        return datetime.fromtimestamp(self._clock.wall(), timezone.utc).isoformat(timespec="milliseconds")

    def _note_dropped(self, when: str) -> None:
        """Tell of dropped lines, once; under the lock."""
        if self._dropped:
            self._parts[-1] += (
                f"{when} - [-] {self._dropped} lines are missing: the store was too slow\n".encode()
            )
            self._dropped = 0

    def _run(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(WRITE_INTERVAL)
            try:
                self._write()
            except Exception as error:  # of the store, or a lack of memory: the next time may succeed
                if not self._failed:
                    log.warning("the output of workers cannot be kept in the store: %s", error)
                self._failed = True

    def _write(self) -> None:
        """Write everything that is new.

        Raises:
            StoreError: the store failed; the next call tries again.
        """
        while True:
            with self._lock:
                data, complete = bytes(self._parts[0]), len(self._parts) > 1
            name = f"{self._prefix}-{self._number:06d}.log"
            if len(data) > self._written:
                self._store.write_bytes(name, data)
                self._written = len(data)
            if not complete:
                return
            with self._lock:
                del self._parts[0]
            self._complete.append((name, len(data)))
            self._number, self._written = self._number + 1, 0
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        while self._complete and sum(size for _, size in self._complete) + self._part_bytes > self._max_bytes:
            self._store.delete(self._complete[0][0])
            del self._complete[0]


class FileListener(OutputListener):
    """Writes all output to `rank.N/stdout` as well, and marks what the driver says.

    Args:
        folder: of the ranks' folders; None for no files. Workers outside of a world write to `rank.none`.
        shown: the arguments of `OutputListener`.
    """

    def __init__(self, folder: Path | None, *shown: Any, **named: Any) -> None:
        super().__init__(*shown, **named)
        self._folder = folder
        self._files: dict[str, IO[str]] = {}  # by rank
        self._files_lock = threading.Lock()

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        super().on_output(worker, rank, line)
        with self._files_lock:
            if self._folder is not None:
                file = self._open_file("none" if rank is None else str(rank), self._folder)
                file.write(line + "\n")
                file.flush()

    def on_message(self, text: str) -> None:
        super().on_message(f"[driver] {text}")

    def close(self) -> None:
        super().close()
        with self._files_lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._folder = None

    def _open_file(self, rank: str, folder: Path) -> IO[str]:
        if rank not in self._files:
            path = folder / f"rank.{rank}"
            path.mkdir(parents=True, exist_ok=True)
            self._files[rank] = (path / "stdout").open("a", encoding="utf-8")
        return self._files[rank]
