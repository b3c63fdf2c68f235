"""Where each training process stands right now, readable from outside even after it was killed.

A process maps a small file of its own and overwrites it at each change of phase; the file keeps the last value when
the process dies. Phases: F forward, B backward, X exchange, A between exchange and apply, S after the step.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

FORMAT = "<cxxxiiiid"  # phase, rank, generation, epoch, step, wall seconds; a string, since it is pickled


@dataclass(frozen=True)
class ProcessPhase:
    pid: int
    phase: str
    rank: int
    generation: int
    epoch: int
    step: int
    wall: float


class Marker:
    """Writes this process's phase."""

    def __init__(self, folder: str) -> None:
        path = Path(folder, f"{os.getpid()}.phase")
        path.write_bytes(bytes(struct.calcsize(FORMAT)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), struct.calcsize(FORMAT))

    def mark(self, phase: str, rank: int, generation: int, epoch: int, step: int) -> None:
        self._memory[:] = struct.pack(FORMAT, phase.encode(), rank, generation, epoch, step, time.time())


def read_phases(folder: str) -> list[ProcessPhase]:
    """Of all processes that ever wrote one."""
    found = (read_phase(folder, int(path.stem)) for path in Path(folder).glob("*.phase"))
    return [one for one in found if one is not None]


def read_phase(folder: str, pid: int) -> ProcessPhase | None:
    """Of one process; None before its first phase."""
    try:
        data = Path(folder, f"{pid}.phase").read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != struct.calcsize(FORMAT) or not data[0]:
        return None
    phase, rank, generation, epoch, step, wall = struct.unpack(FORMAT, data)
    return ProcessPhase(pid, phase.decode(), rank, generation, epoch, step, wall)
