"""R2 (ledger): which rows were trained in which step, as written by the workers.

A rank writes its rows before it contributes to a step, and a second line after it has applied the step. For each step,
the highest attempt and generation that applied it counts. What is written before a contribution survives the death of
the process; a line after it may be lost with the process in a store that cannot append, but survivors have it, too.
"""

from __future__ import annotations

import json
import os
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from spark_elastic.clock import SystemClock
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import Position


class Ledger:
    """JSON lines of this process. In a local folder they go to a file, and each reaches the kernel at once; in a store
    that cannot append, such as S3, into an object for each step, with the lines since the one before."""

    def __init__(self, store: Store | None = None, folder: str | None = None) -> None:
        """folder: as in `TrainSpec.ledger`; None: nothing is written."""
        self._store, self._folder, self._clock = store, folder, SystemClock()
        self._prefix = f"{folder}/{os.uname().nodename}-{os.getpid()}-{self._clock.wall():.6f}"
        self._objects = 0  # so many were written
        self._lines: list[bytes] = []  # that are in no object yet
        self._file: BinaryIO | None = None
        if folder is not None and os.path.isabs(folder):
            os.makedirs(folder, exist_ok=True)
            self._file = open(f"{self._prefix}.jsonl", "ab", buffering=0)  # noqa: SIM115 - closed in close()

    def write_ahead(self, fence: tuple[int, int], position: Position, row_ids: npt.NDArray[np.int64]) -> None:
        if self._folder is not None:
            self.mark("contributes", fence, position, rows=row_ids.tolist())
            self._flush()

    def record_applied(self, fence: tuple[int, int], position: Position, world_size: int) -> None:
        self.mark("applied", fence, position, world=world_size)

    def close(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()

    def mark(self, event: str, fence: tuple[int, int], position: Position, **more: object) -> None:
        """Record a step's event, or the time of a phase of a recovery: formed, synced, runs, read, broke."""
        if self._folder is None:
            return
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
        written = json.dumps(line).encode() + b"\n"
        if self._file is None:
            self._lines.append(written)
        else:
            self._file.write(written)

    def _flush(self) -> None:
        """All lines survive this process once this returns."""
        if self._lines and self._store is not None:
            self._store.write_bytes(f"{self._prefix}-{self._objects:07d}.jsonl", b"".join(self._lines))
            self._objects += 1
            self._lines.clear()
