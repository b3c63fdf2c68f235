"""Snapshots of a state, copied off the training thread and never torn (R20).

Two flat memories take turns: one holds the newest complete version while a thread of the running copy fills the other.
A version exists only once its copy is complete; who changes what is being copied must `wait` first. The training
thread owns everything; the copying thread reads live memory and writes the spare one.
"""

from __future__ import annotations

import _thread
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
ALIGN = 64  # bytes between the beginnings of two pieces


class Place(NamedTuple):
    """Where a piece lies in a snapshot's memory, in bytes."""

    offset: int
    nbytes: int


class SnapshotBuilder:
    """What a version is made of, laid out one after the other."""

    def __init__(self) -> None:
        self.now: list[tuple[int, Bytes]] = []
        self.later: list[tuple[int, Bytes]] = []
        self.marks: list[Callable[[], int]] = []
        self.end = 0

    def put(self, memory: Bytes, mark: Callable[[], int] | None = None) -> Place:
        """Have `memory` copied: before the commit returns, or in the background where `mark` is given.

        mark: a number that changes with each change of the memory; nobody may change it before `SnapshotBuffer.wait`.
        """
        place = Place(self.end, memory.nbytes)
        if mark is None:
            self.now.append((self.end, memory))
        else:
            self.later.append((self.end, memory))
            self.marks.append(mark)
        self.end += -(-memory.nbytes // ALIGN) * ALIGN
        return place


@dataclass(frozen=True)
class Snapshot:
    """One version. picture: small and picklable, with `Place`s in `memory` for what is large."""

    version: int
    picture: Any
    memory: Bytes


class _Copy:
    """Fills a snapshot, by `run` or in a thread of its own; `torn` once it is through: something changed meanwhile."""

    def __init__(self, snapshot: Snapshot, tray: SnapshotBuilder) -> None:
        self.snapshot = snapshot
        self.torn = False
        self._pieces = tray.later
        self._marks = tray.marks
        self._before = [mark() for mark in tray.marks]
        self._through = threading.Lock()

    def start(self) -> None:
        """Without waiting for the thread to come up, as `threading.Thread` does."""
        self._through.acquire()
        _thread.start_new_thread(self._run_and_tell, ())

    def run(self) -> None:
        _copy(self._pieces, self.snapshot.memory)
        self.torn = [mark() for mark in self._marks] != self._before

    def join(self) -> None:
        with self._through:
            pass

    def _run_and_tell(self) -> None:
        self.torn = True  # until it is through, whatever happens
        try:
            self.run()
        finally:
            self._through.release()


class SnapshotBuffer:
    """The newest complete version, and the one that is being copied."""

    def __init__(self) -> None:
        self._newest: Snapshot | None = None
        self._spare: Bytes = np.empty(0, np.uint8)
        self._running: _Copy | None = None
        self._hurried = False

    def take(self, version: int, capture: Callable[[SnapshotBuilder], Any]) -> None:
        """Begin a version; `capture` puts what is large on the tray and returns the rest of the picture."""
        self.wait()
        tray = SnapshotBuilder()
        picture = capture(tray)
        snapshot = Snapshot(version, picture, self.spare(tray.end))
        _copy(tray.now, snapshot.memory)
        copy = _Copy(snapshot, tray)
        if self._hurried or not tray.later:
            copy.run()
            self._swap(snapshot)
        else:
            self._running = copy
            copy.start()

    def wait(self) -> None:
        """Wait until nothing is being copied; the version that was copied is then the newest."""
        copy, self._running = self._running, None
        if copy is None:
            return
        copy.join()
        if copy.torn:
            self._hurried = True
            warnings.warn(
                "a parameter was changed in place after commit() and outside of optimizer.step(), so that commit does "
                "not count; from now on commits copy everything before they return.",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        self._swap(copy.snapshot)

    def newest(self) -> Snapshot | None:
        self.wait()
        return self._newest

    def adopt(self, snapshot: Snapshot) -> None:
        """A version that was made elsewhere takes the place of the newest."""
        self.wait()
        self._swap(snapshot)

    def spare(self, nbytes: int) -> Bytes:
        """Memory of exactly so many bytes that holds no complete version."""
        if self._spare.nbytes != nbytes:
            self._spare = np.empty(nbytes, np.uint8)
        return self._spare

    def _swap(self, snapshot: Snapshot) -> None:
        former, self._newest = self._newest, snapshot
        self._spare = np.empty(0, np.uint8) if former is None else former.memory


def _copy(pieces: list[tuple[int, Bytes]], memory: Bytes) -> None:
    for offset, piece in pieces:
        np.copyto(memory[offset : offset + piece.nbytes], piece)
