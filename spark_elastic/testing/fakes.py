"""Stand-ins for tests: a cluster of processes on this machine, a clock moved by hand, and a program that counts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from elastic_collectives import Group
from spark_elastic.clock import Clock, SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.types import Phase, Position, SlotSpec, WorldView
from spark_elastic.worker.program import Completed, Outcome, Stopped, WorkerHandle

WIDTH = 1000  # numbers in the state of a `CountingProgram`


class NumberedHosts(HostSlots):
    """Room for a number of slots on numbered hosts; further slot jobs stay pending, as in Spark."""

    def __init__(self, room: int, slots_per_host: int) -> None:
        super().__init__({"any": room})
        self._slots = room
        self._per_host = slots_per_host

    def acquire(self, launch: int) -> str | None:
        return None if super().acquire(launch) is None else f"host-{launch // self._per_host}"

    def release(self, host: str) -> None:
        super().release("any")

    def add(self, slots: int) -> None:
        self._slots += slots
        self.update({"any": self._slots})


class ProcessLauncher(LocalLauncher):
    """`LocalLauncher` on numbered hosts, by default one per slot. Workers are spawned and have short timeouts."""

    def __init__(
        self,
        program: object,
        clock: Clock,
        preload: tuple[str, ...] = (),
        slots_per_host: int = 1,
        room: int = 1000,
        collective_timeout: float = 20.0,
        spare_after: float = 0.0,
    ) -> None:
        """room: how many slots this cluster has. collective_timeout: of its workers, in seconds. spare_after: as the
        setting; tests that kill whole slots need no spares, which import frameworks for as long as a worker."""
        self._hosts = NumberedHosts(room, slots_per_host)
        self._collective_timeout, self._spare_after = collective_timeout, spare_after
        super().__init__(program, self._hosts, clock, preload)

    def start(self, spec: SlotSpec, post: Post) -> None:
        quick = replace(
            spec,
            collective_timeout=self._collective_timeout,
            driver_timeout=20.0,
            spare_after=self._spare_after,
            fork_workers=False,
        )
        super().start(quick, post)

    def add_room(self, slots: int) -> None:
        """Add hosts, on which pending slot jobs start."""
        self._hosts.add(slots)


class FakeClock:
    """`spark_elastic.clock.Clock` for tests: `sleep` moves the time. One thread moves it; any thread may read it."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall_offset + self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds} s")
        self._now += seconds


class CountingProgram:
    """A program without a framework whose result shows every step that was lost, repeated or half applied: step s adds
    f(s) to one vector, divided evenly over the ranks, so its final value does not depend on the worlds in between."""

    def __init__(self, steps: int, seconds: float = 0.0, rows: int = 96) -> None:
        self._steps = steps
        self._seconds = seconds  # that each step takes
        self._rows = rows  # of each step
        self._clock = SystemClock()
        self._step: int | None = None
        self._state = np.zeros(WIDTH)
        self._sizes: list[int] = []

    def prepare(self) -> None:
        """Nothing to prepare."""

    def position(self) -> Position | None:
        return None if self._step is None else Position(0, Phase.TRAIN, self._step)

    def sync(self, world: WorldView, group: Group) -> Position:
        source = world.source
        staging = np.array([self._step if group.rank == source else 0, *self._state], dtype=np.float64)
        group.broadcast(staging, 0 if source is None else source)
        self._step, self._state = int(staging[0]), staging[1:].copy()
        return Position(0, Phase.TRAIN, self._step)

    def run(self, world: WorldView, group: Group, handle: WorkerHandle) -> Outcome:
        self._step = self._step or 0
        self._sizes.append(group.size)
        while self._step < self._steps:
            self._clock.sleep(self._seconds)
            change = self._share(self._step, group.rank, group.size)
            group.allreduce(change)
            versions = group.allgather(np.array([handle.membership_version().encode()], dtype=np.int64))
            self._state += change
            self._step += 1
            handle.report_position(Position(0, Phase.TRAIN, self._step))
            handle.report_metrics({"step": self._step, "world": group.size})
            if versions.max() > world.version.encode():
                return Stopped("the membership changes")
        result = {"sum": float(self._state.sum()), "worlds": self._sizes, "rank": group.rank}
        return Completed(json.dumps(result))

    def close(self) -> None:
        """Nothing to free."""

    def expected_sum(self) -> float:
        """What "sum" must be at the end, in the result of every rank."""
        return float(sum(row + step for step in range(self._steps) for row in range(self._rows)) * WIDTH)

    def _share(self, step: int, rank: int, size: int) -> np.ndarray:
        first, last = self._rows * rank // size, self._rows * (rank + 1) // size
        return np.full(WIDTH, float(sum(row + step for row in range(first, last))))
