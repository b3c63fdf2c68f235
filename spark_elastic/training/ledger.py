"""R2 (ledger): which rows were trained in which step, as written by the workers.

A rank writes its rows before it contributes to a step, and a second line after it has applied the step. For each step,
the highest attempt and generation that applied it counts. What is written before a contribution survives the death of
the process; a line after it may be lost with the process in a store that cannot append, but survivors have it, too.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import Position


class Ledger:
    """Writes nothing."""

    def write_ahead(self, fence: tuple[int, int], position: Position, row_ids: npt.NDArray[np.int64]) -> None:
        """Record the rows of a step before this rank contributes to it."""

    def record_applied(self, fence: tuple[int, int], position: Position, world: int) -> None:
        """Record that this rank applied a step, in a world of that size."""

    def mark(self, event: str, fence: tuple[int, int], position: Position) -> None:
        """Record the time of a phase of a recovery: formed, synced, runs, read, broke."""

    def close(self) -> None:
        """Write the rest and close what is open."""


class LineLedger(Ledger, ABC):
    """JSON lines of this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def write_ahead(self, fence: tuple[int, int], position: Position, row_ids: npt.NDArray[np.int64]) -> None:
        self._write(self._make_line("contributes", fence, position, rows=row_ids.tolist()))
        self._flush()

    def record_applied(self, fence: tuple[int, int], position: Position, world: int) -> None:
        self._write(self._make_line("applied", fence, position, world=world))

    def mark(self, event: str, fence: tuple[int, int], position: Position) -> None:
        self._write(self._make_line(event, fence, position))

    @abstractmethod
    def _write(self, line: bytes) -> None: ...

    @abstractmethod
    def _flush(self) -> None:
        """All lines survive this process once this returns."""

    def _name_file(self) -> str:
        return f"{os.uname().nodename}-{os.getpid()}-{self._clock.wall():.6f}"

    def _make_line(self, event: str, fence: tuple[int, int], position: Position, **more: object) -> bytes:
        line = {
            "event": event,
            "pid": os.getpid(),
            "wall": self._clock.wall(),
            "attempt": fence[0],
            "generation": fence[1],
            "epoch": position.epoch,
            "step": position.step,
            **more,
        }
        return json.dumps(line).encode() + b"\n"


class FileLedger(LineLedger):
    """A file of this process in a local folder. A line reaches the kernel at once."""

    def __init__(self, folder: str, clock: Clock) -> None:
        super().__init__(clock)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{self._name_file()}.jsonl")
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        self._file.write(line)

    def _flush(self) -> None:
        """The file has no buffer."""


class StoreLedger(LineLedger):
    """Objects in a store that cannot append, such as S3: one for each step, with the lines since the one before."""

    def __init__(self, store: Store, folder: str, clock: Clock) -> None:
        super().__init__(clock)
        self._store = store
        self._prefix = f"{folder}/{self._name_file()}"
        self._objects = 0  # so many were written
        self._lines: list[bytes] = []  # that are in no object yet

    def close(self) -> None:
        self._flush()

    def _write(self, line: bytes) -> None:
        self._lines.append(line)

    def _flush(self) -> None:
        if self._lines:
            self._store.write_bytes(f"{self._prefix}-{self._objects:07d}.jsonl", b"".join(self._lines))
            self._objects += 1
            self._lines.clear()


def open_ledger(store: Store, folder: str | None, clock: Clock) -> Ledger:
    """folder: as in `TrainSpec.ledger`."""
    if folder is None:
        return Ledger()
    return FileLedger(folder, clock) if os.path.isabs(folder) else StoreLedger(store, folder, clock)
