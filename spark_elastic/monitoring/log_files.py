"""What a run's workers print, kept in its store: `runs/RUN/logs/ATTEMPT-PART.log`, a line each with time and worker.

Lines are gathered and written by a thread of their own, at most once in `WRITE_EVERY` seconds; an object store cannot
add to an object, so a part is written again while it grows. One stream, not a file for each worker: the number of
objects does not grow with the number of workers. Bounded: the oldest parts go. A store that fails costs
lines and one warning, never the job.
"""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError

log = logging.getLogger("spark_elastic")

PART_BYTES = 1 << 20
WRITE_EVERY = 10.0  # seconds
MOST_WAITING = 8  # parts in memory, while the store is slow
END_WAIT = 30.0  # seconds that closing waits for the store


class LogFiles:
    """most_bytes: of this attempt's files together; a part more may be there for a moment."""

    def __init__(self, store: Store, run_id: str, attempt: int, most_bytes: int, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._stem = f"runs/{run_id}/logs/{attempt:06d}"
        self._most = most_bytes
        self._part_bytes = min(PART_BYTES, max(1, most_bytes // 4))
        self._lock = threading.Lock()  # guards the next two
        self._parts: list[bytearray] = [bytearray()]  # not complete or not written yet; the last one grows
        self._left_out = 0
        self._number = 1  # of the first of `_parts`; this and the rest belong to the writing thread
        self._kept: list[tuple[str, int]] = []  # complete objects with their bytes, oldest first
        self._written = 0  # bytes of the first of `_parts` that are in the store
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-log-files", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, worker: str, rank: int | None, lines: tuple[str, ...]) -> None:
        """Take lines; returns at once. worker: "" before the process is one."""
        when = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")
        who = f"{when} {worker or '-'} [{'-' if rank is None else rank}] "
        with self._lock:
            if len(self._parts) > MOST_WAITING:
                self._left_out += len(lines)
                return
            part = self._parts[-1]
            if self._left_out:
                part += f"{when} - [-] {self._left_out} lines are missing: the store was too slow\n".encode()
                self._left_out = 0
            part += "".join(f"{who}{line}\n" for line in lines).encode("utf-8", "replace")
            if len(part) >= self._part_bytes:
                self._parts.append(bytearray())

    def close(self) -> None:
        """Write what is left; waits for the store for `END_WAIT` seconds."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(END_WAIT)

    def _run(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(WRITE_EVERY)
            try:
                self._write()
            except StoreError as error:
                if not self._failed:
                    log.warning("what workers print cannot be kept: %s", error)
                self._failed = True

    def _write(self) -> None:
        """Everything that has come since the last time.

        Raises:
            StoreError: the store failed; what was not written is tried again.
        """
        while True:
            with self._lock:
                data, complete = bytes(self._parts[0]), len(self._parts) > 1
            name = f"{self._stem}-{self._number:06d}.log"
            if len(data) > self._written:
                self._store.write_bytes(name, data)
                self._written = len(data)
            if not complete:
                return
            with self._lock:
                del self._parts[0]
            self._kept.append((name, len(data)))
            self._number, self._written = self._number + 1, 0
            self._trim()

    def _trim(self) -> None:
        while self._kept and sum(size for _, size in self._kept) + self._part_bytes > self._most:
            self._store.delete(self._kept[0][0])
            del self._kept[0]
