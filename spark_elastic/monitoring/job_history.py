"""Keeps what people will ask about a running job, in bounded memory: changes of the world, phases, curves, story.

Fed by the driver's loop (`turn`) and the server's thread (`heard`), read by whoever asks; one lock owns it. It decides
nothing, and an event that concerns nobody costs it an addition.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_elastic.monitoring.report import (
    PHASES,
    JobReport,
    MetricPoint,
    MetricSeries,
    Throughput,
    WorldChange,
    WorldChangeKind,
    count_steps,
)
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol.driver.state import DriverState
from spark_elastic.protocol.messages import JoinWorld, WorkerDone, WorldFormed
from spark_elastic.protocol.types import Phase, Position, World

MAX_WORLD_CHANGES = 5000
MAX_ENTRIES = 400


@dataclass(frozen=True)
class HistoryEntry:
    """A sentence of the story. times: how many of its kind came in a row, of which this is the last."""

    at: float
    kind: str
    text: str
    times: int = 1


class JobHistory:
    """started: monotonic seconds of the launch. on_change: takes each change once its world stands, in the caller's
    thread of `turn`."""

    def __init__(
        self, started: float, on_change: Callable[[WorldChange], None] = lambda change: None
    ) -> None:
        self._started = started
        self._on_change = on_change
        self._lock = threading.Lock()
        self._changes: deque[WorldChange] = deque(maxlen=MAX_WORLD_CHANGES)
        self._told: deque[HistoryEntry] = deque(maxlen=MAX_ENTRIES)
        self._curve, self._speed = MetricSeries(), Throughput()
        self._numbers: dict[str, Any] = {}
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = "start", 0.0  # of which phase now is, and since when
        self._reserved = self._useful = 0.0  # worker-seconds
        self._slots, self._last = 0, 0.0
        self._state: DriverState | None = None
        self._world: World | None = None
        self._checkpoints = 0
        self._held_up = self._held_up_before = 0.0
        self._ended = False

    def turn(
        self, event: on.DriverEvent, commands: Sequence[do.DriverCommand], after: DriverState | None
    ) -> None:
        """An event, what the machine made of it, and the state that followed."""
        at, done = event.now - self._started, None
        with self._lock:
            self._reserved += self._slots * max(0.0, at - self._last)
            self._last = max(at, self._last)
            if after is not None:
                self._state, self._slots = after, len(after.slots)
            for command in commands:
                self._command(at, command)
            match event:
                case on.Received(_, WorldFormed() as message):
                    done = self._formed(at, message, after)
                case on.Received(_, JoinWorld() | WorkerDone() as message):
                    self._left(at, message)
                case on.WorkerStalled():
                    self._tell(at, "stall", event.text)
        if done is not None:
            self._on_change(done)

    def heard(self, now: float, numbers: Mapping[str, Any]) -> None:
        """Rank 0's newest report."""
        at = now - self._started
        loss = numbers.get("loss")
        held_up = float(numbers.get("checkpoint_seconds", 0.0))
        with self._lock:
            if held_up < self._held_up:  # another process is rank 0 now
                self._held_up_before += self._held_up
            self._held_up = held_up
            self._numbers = dict(numbers)
            self._speed.add(at, numbers)
            speed = self._speed.rows_per_second
            loss = None if loss is None else float(loss)
            self._curve.add(MetricPoint(at, count_steps(numbers), loss, speed, int(numbers.get("world", 0))))

    def report(self, now: float) -> JobReport:
        """The report of the job so far."""
        at = now - self._started
        with self._lock:
            phases = dict(self._phases)
            if not self._ended:
                phases[self._phase] += max(0.0, at - self._since)
            return JobReport(
                seconds=at,
                phases=phases,
                world_changes=tuple(self._changes),
                curve=self._curve.points,
                checkpoints=self._checkpoints,
                checkpoint_seconds=self._held_up_before + self._held_up,
                reserved_hours=self._reserved / 3600,
                useful_hours=(self._useful + self._training_now(at)) / 3600,
            )

    def look(self) -> tuple[DriverState | None, dict[str, Any], Throughput, tuple[HistoryEntry, ...]]:
        """The newest state and numbers of rank 0, its speed, and the story."""
        with self._lock:
            return self._state, self._numbers, self._speed, tuple(self._told)

    # ---- under the lock

    def _command(self, at: float, command: do.DriverCommand) -> None:
        match command:
            case do.Publish(_, world):
                self._published(at, world)
            case do.Abort():
                if self._phase in ("start", "closing"):  # no world stood yet, or some had returned
                    self._switch(at, "recovery")
                self._stops(at, "recovery")
            case do.PublishCheckpoint():
                self._checkpoints += 1
            case do.End():
                self._stops(at, "closing")
                self._switch(at, "closing")
                self._ended = True
        self._tell(at, _words(type(command).__name__), command.reason)

    def _published(self, at: float, world: World) -> None:
        before, now = _members(self._world), _members(world)
        # The world before may have ended without a word: a planned boundary at which nobody had to come again.
        self._stops(at, "planned")
        kind = self._kind() if before & now or not before else WorldChangeKind.RESTART
        self._changes.append(
            WorldChange(
                world.fence.generation, at, kind, len(before), len(now), len(now - before),
                len(before - now), world.reason, steps_lost=self._steps_lost(world),
            )
        )  # fmt: skip
        self._world = world

    def _kind(self) -> WorldChangeKind:
        if self._world is None:
            return WorldChangeKind.START
        return WorldChangeKind.LOSS if self._phase == "recovery" else WorldChangeKind.PLANNED

    def _formed(self, at: float, message: WorldFormed, after: DriverState | None) -> WorldChange | None:
        """The change, once the last member has built the world."""
        world = self._world
        if (
            world is None
            or after is None
            or after.workers.unformed
            or message.fence != world.fence
            or self._phase == "training"
        ):
            return None
        change = dataclasses.replace(self._changes[-1], seconds=at - self._since)
        self._changes[-1] = change
        self._switch(at, "training")
        return change

    def _left(self, at: float, message: JoinWorld | WorkerDone) -> None:
        """The first member that leaves the world stops it as a whole."""
        if self._world is None or message.fence != self._world.fence:
            return
        if isinstance(message, WorkerDone):
            self._stops(at, "closing")
        else:
            self._stops(at, "planned" if message.planned else "recovery")

    def _stops(self, at: float, phase: str) -> None:
        """Training stops; a loss during a planned change makes it a recovery."""
        if self._phase == "training":
            self._switch(at, phase)
        elif self._phase == "planned" and phase == "recovery":
            self._phase = phase

    def _switch(self, at: float, phase: str) -> None:
        self._useful += self._training_now(at)
        self._phases[self._phase] += max(0.0, at - self._since)
        self._phase, self._since = phase, at

    def _training_now(self, at: float) -> float:
        if self._phase != "training" or self._world is None:
            return 0.0
        return self._world.size * max(0.0, at - self._since)

    def _steps_lost(self, world: World) -> int:
        """Steps that were reported and are to be taken again."""
        if self._world is None or not self._numbers:
            return 0
        onward = world.start_position
        return max(0, count_steps(self._numbers) - _done(onward, int(self._numbers.get("steps", 0))))

    def _tell(self, at: float, kind: str, text: str) -> None:
        times = 1
        if (
            kind in ("launch slot", "release slot", "stop worker")
            and self._told
            and self._told[-1].kind == kind
        ):
            times = self._told.pop().times + 1  # thousands at a start or an end
        self._told.append(HistoryEntry(at, kind, text, times))


def _members(world: World | None) -> set[str]:
    return set() if world is None else {member.worker for member in world.members}


def _done(position: Position | None, steps: int) -> int:
    if position is None:
        return 0
    return position.epoch * steps + (position.step if position.phase is Phase.TRAIN else steps)


def _words(name: str) -> str:
    """LaunchSlot -> launch slot."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
