"""Counting programs that wait for a test, or make a short moment of the protocol long, so that a loss meets it."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from elastic_collectives import CollectiveError, Group
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Position, WorldView
from spark_elastic.testing.fakes import CountingProgram
from spark_elastic.worker.program import CHANGE, Completed, Outcome, Stopped, WorkerHandle

LONG = 1.0  # seconds
LOOK_EVERY = 0.03  # seconds
HELD_AT_MOST = 60.0  # seconds in one world; then it continues, and the test sees what is missing

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class HeldProgram(CountingProgram):
    """Its last step waits until the test calls `release`, so that no blow comes after the end."""

    def __init__(self, steps: int, seconds: float = 0.0) -> None:
        super().__init__(steps, seconds)
        hold, self._hold = tempfile.mkstemp(prefix="held-")
        os.close(hold)

    def release(self) -> None:
        Path(self._hold).unlink(missing_ok=True)

    def run(self, world: WorldView, group: Group, handle: WorkerHandle) -> Outcome:
        self._steps -= 1
        try:
            outcome = super().run(world, group, handle)
        finally:
            self._steps += 1
        if isinstance(outcome, Completed):
            outcome = self._wait_for_release(world, group, handle) or super().run(world, group, handle)
        return outcome

    def _wait_for_release(self, world: WorldView, group: Group, handle: WorkerHandle) -> Stopped | None:
        """Until it is released or, as after any step, the membership changes; the same on all ranks."""
        deadline = self._clock.now() + HELD_AT_MOST
        while True:
            self._clock.sleep(LOOK_EVERY)
            handle.report_metrics({"step": self._step, "world": group.size})  # again: one may have been lost
            free = not os.path.exists(self._hold) or self._clock.now() > deadline
            told = group.allgather(np.array([handle.membership_version().encode(), free], dtype=np.int64))
            if told[:, 0].max() > world.version.encode():
                return Stopped(CHANGE)
            if told[:, 1].any():
                return None


class ActListener(JobListener):
    """Calls `act` once, in a thread, when rank 0 has reported that step, and `then` in each world but the first."""

    def __init__(self, step: int, act: Callable[[], object], then: Callable[[], None] = lambda: None) -> None:
        self._step, self._then = step, then
        self._act: Callable[[], object] | None = act
        self.sizes: list[int] = []

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        if self._act is not None and metrics["step"] >= self._step:
            act, self._act = self._act, None
            threading.Thread(target=act, name="act").start()

    def on_world(self, size: int, reason: str) -> None:
        self.sizes.append(size)
        if len(self.sizes) > 1:
            self._then()


class NeverReturns(CountingProgram):
    """Rank 1 of the first world calls C code that keeps the interpreter's lock for ever."""

    def run(self, world: WorldView, group: Group, handle: WorkerHandle) -> Outcome:
        if world.fence.generation == 1 and group.rank == 1:
            self.call_c_code()
        return super().run(world, group, handle)

    def call_c_code(self) -> None:
        nothing_comes, _ = os.pipe()
        ctypes.PyDLL(None).read(nothing_comes, ctypes.create_string_buffer(1), 1)


class SlowSync(HeldProgram):
    """Before it takes or hands over the state of a survivor, every rank tells and dwells."""

    def sync(self, world: WorldView, group: Group) -> Position:
        if world.has_receivers and world.source is not None:
            say(f"syncs as rank {group.rank} of world {world.fence.generation}")
            self._clock.sleep(LONG)
        return super().sync(world, group)


class SlowReturn(HeldProgram):
    """The survivors of the first world take their time to come back from it."""

    def run(self, world: WorldView, group: Group, handle: WorkerHandle) -> Outcome:
        try:
            return super().run(world, group, handle)
        except CollectiveError:
            if world.fence.generation == 1:
                say("comes back slowly")
                self._clock.sleep(LONG)
            raise
