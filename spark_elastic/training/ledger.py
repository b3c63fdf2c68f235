"""The ledger (R2): which rows were trained in which step, as written by the workers.

A rank writes its rows before it contributes to a step, and a second line after it has applied the step. Each worker has
one file of JSON lines. A line reaches the kernel before the call returns, so it survives the death of the process. For
each step, the highest attempt and generation that applied it counts.
"""

from __future__ import annotations

import json
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spark_elastic.clock import Clock
from spark_elastic.protocol.types import Position


class Ledger(Protocol):
    def write_ahead(
        self, fence: tuple[int, int], position: Position, row_ids: npt.NDArray[np.int64]
    ) -> None: ...

    def record_applied(self, fence: tuple[int, int], position: Position, world: int) -> None: ...

    def mark(self, event: str, fence: tuple[int, int], position: Position) -> None:
        """Record the time of a phase of a recovery: formed, synced, runs, read, broke."""
        ...

    def close(self) -> None: ...


class NullLedger:
    """Writes nothing."""

    def write_ahead(self, fence: tuple[int, int], position: Position, row_ids: npt.NDArray[np.int64]) -> None:
        """Writes nothing."""

    def record_applied(self, fence: tuple[int, int], position: Position, world: int) -> None:
        """Writes nothing."""

    def mark(self, event: str, fence: tuple[int, int], position: Position) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Writes nothing."""


class FileLedger:
    """A file of this process in a local folder."""

    def __init__(self, folder: str, clock: Clock) -> None:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{os.uname().nodename}-{os.getpid()}-{clock.wall():.6f}.jsonl")
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self._clock = clock

    def write_ahead(self, fence: tuple[int, int], position: Position, row_ids: npt.NDArray[np.int64]) -> None:
        self._line("contributes", fence, position, rows=row_ids.tolist())

    def record_applied(self, fence: tuple[int, int], position: Position, world: int) -> None:
        self._line("applied", fence, position, world=world)

    def mark(self, event: str, fence: tuple[int, int], position: Position) -> None:
        self._line(event, fence, position)

    def close(self) -> None:
        self._file.close()

    def _line(self, event: str, fence: tuple[int, int], position: Position, **more: object) -> None:
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
        self._file.write(json.dumps(line).encode() + b"\n")
