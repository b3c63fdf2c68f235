"""The history of a running job in bounded memory: world changes, time per phase, metrics, and the decisions made.

Observes the driver's thread (`on_transition`) and the server's (`on_progress`); any thread may read. One lock guards
everything.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_elastic.clock import Clock
from spark_elastic.monitoring.listener import JobListener, Metrics
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
from spark_elastic.protocol.messages import RequestNextWorld, WorkerDone, WorldFormed
from spark_elastic.protocol.types import Checkpoint, Phase, Position, World

MAX_WORLD_CHANGES = 5000
MAX_ENTRIES = 400
MAX_LOST_SLOTS = 100
LOST_SECONDS = 600.0  # for so long the status page shows a slot that is gone
# There may be thousands of them: at the start, at the end, or during a long training.
MERGED_ENTRIES = ("launch slot", "release slot", "stop worker", "publish checkpoint")


@dataclass(frozen=True)
class HistoryEntry:
    """A decision of the driver, or a stall."""

    at: float  # seconds since the launch
    kind: str  # such as "launch slot"
    text: str  # the reason
    # Number of successive entries of this kind that were merged; `text` is that of the last one.
    times: int = 1


@dataclass(frozen=True)
class LostSlot:
    """A slot that is gone."""

    at: float  # seconds since the launch
    host: str  # Spark's id of the executor, or the host's name
    node: str  # name of the machine
    worker: str  # "" if it had none
    rank: int | None  # None if it was in no world
    reason: str  # why it is gone, in words


class HistoryView(NamedTuple):
    """What the status page reads of a history at one time."""

    now: float  # on the driver's clock
    state: DriverState | None  # of the driver machine; None before its first event
    metrics: Metrics  # newest report of rank 0
    throughput: Throughput  # from those reports
    entries: tuple[HistoryEntry, ...]  # what happened, oldest first
    lost_slots: tuple[LostSlot, ...]  # those of the last `LOST_SECONDS`, newest first


class JobHistory(JobListener):
    """Begins when it is created.

    Args:
        on_world_change: called for each world once all members have built it, on the driver's thread.
    """

    def __init__(
        self, clock: Clock, on_world_change: Callable[[WorldChange], None] = lambda change: None
    ) -> None:
        self._clock = clock
        self._started = clock.now()
        self._on_world_change = on_world_change
        self._lock = threading.Lock()
        self._changes: deque[WorldChange] = deque(maxlen=MAX_WORLD_CHANGES)
        self._entries: deque[HistoryEntry] = deque(maxlen=MAX_ENTRIES)
        self._series, self._throughput = MetricSeries(), Throughput()
        self._metrics: Metrics = {}
        self._phases = dict.fromkeys(PHASES, 0.0)  # seconds, without the current phase
        self._phase, self._phase_since = "start", 0.0
        self._reserved = self._useful = 0.0  # worker-seconds
        self._slots = 0
        self._lost: deque[LostSlot] = deque(maxlen=MAX_LOST_SLOTS)
        self._last_event = 0.0
        self._state: DriverState | None = None
        self._world: World | None = None
        self._checkpoints = 0
        self._newest_checkpoint: Checkpoint | None = None
        self._checkpoint_seconds = 0.0  # as reported by the current process of rank 0
        self._earlier_checkpoint_seconds = 0.0  # of the processes that were rank 0 before
        self._ended = False

    def on_transition(
        self, event: on.DriverEvent, commands: Sequence[do.DriverCommand], state: DriverState | None
    ) -> None:
        at, change = event.now - self._started, None
        with self._lock:
            self._reserved += self._slots * max(0.0, at - self._last_event)
            self._last_event = max(at, self._last_event)
            if state is not None:
                if len(state.slots) < self._slots and not self._ended:
                    self._add_lost_slots(at, state)
                self._state, self._slots = state, len(state.slots)
            for command in commands:
                self._add_command(at, command)
            match event:
                case on.Received(_, WorldFormed() as message):
                    change = self._complete_world(at, message, state)
                case on.Received(_, RequestNextWorld() | WorkerDone() as message):
                    self._leave_world(at, message)
                case on.WorkerStalled():
                    self._add_entry(at, "stall", event.text)
        if change is not None:
            self._on_world_change(change)

    def on_progress(self, metrics: Metrics) -> None:
        at = self._clock.now() - self._started
        checkpoint_seconds = float(metrics.get("checkpoint_seconds", 0.0))
        loss = float(metrics["loss"]) if metrics.get("loss") is not None else None
        with self._lock:
            if checkpoint_seconds < self._checkpoint_seconds:  # another process is rank 0 now
                self._earlier_checkpoint_seconds += self._checkpoint_seconds
            self._checkpoint_seconds = checkpoint_seconds
            self._add_bulk_seconds(metrics)
            self._metrics = dict(metrics)
            self._throughput.add(at, metrics)
            rate, world = self._throughput.rows_per_second, int(metrics.get("world", 0))
            self._series.add(MetricPoint(at, count_steps(metrics), loss, rate, world))

    def build_report(self) -> JobReport:
        """The report of the job so far."""
        at = self._clock.now() - self._started
        with self._lock:
            phases = dict(self._phases)
            if not self._ended:
                phases[self._phase] += max(0.0, at - self._phase_since)
            return JobReport(
                seconds=at,
                phases=phases,
                world_changes=tuple(self._changes),
                curve=self._series.points,
                checkpoints=self._checkpoints,
                checkpoint_seconds=self._earlier_checkpoint_seconds + self._checkpoint_seconds,
                reserved_hours=self._reserved / 3600,
                useful_hours=(self._useful + self._sum_useful_seconds(at)) / 3600,
            )

    def view(self) -> HistoryView:
        now = self._clock.now()
        with self._lock:
            lost = tuple(s for s in reversed(self._lost) if now - self._started - s.at <= LOST_SECONDS)
            return HistoryView(now, self._state, self._metrics, self._throughput, tuple(self._entries), lost)

    # ---- under the lock

    def _add_bulk_seconds(self, metrics: Metrics) -> None:
        """Metrics may arrive when the next world has begun."""
        if metrics.get("bulk_seconds") is None:
            return
        for number, change in enumerate(self._changes):
            if change.generation == metrics.get("bulk_generation"):
                seconds = float(metrics["bulk_seconds"])
                self._changes[number] = dataclasses.replace(change, bulk_seconds=seconds)

    def _add_command(self, at: float, command: do.DriverCommand) -> None:
        match command:
            case do.PublishWorld(_, world):
                self._add_world(at, world)
            case do.AbortWorld():
                # No world was complete yet, or some workers had finished.
                if self._phase in ("start", "closing"):
                    self._switch_phase(at, "recovery")
                self._stop_training(at, "recovery")
            case do.PublishCheckpoint(_, kept) if kept[0] != self._newest_checkpoint:
                self._checkpoints += 1
                self._newest_checkpoint = kept[0]
            case do.End():
                self._stop_training(at, "closing")
                self._switch_phase(at, "closing")
                self._ended = True
        self._add_entry(at, _split_words(type(command).__name__), command.reason)

    def _add_lost_slots(self, at: float, state: DriverState) -> None:
        before = self._state
        assert before is not None
        for name, slot in before.slots.items():
            if name not in state.slots:
                worker = None if slot.worker is None else before.workers.get(slot.worker)
                rank = None if worker is None else worker.rank
                reason = state.slots.departed.get(name, "")
                self._lost.append(LostSlot(at, slot.host, slot.node, slot.worker or "", rank, reason))

    def _add_world(self, at: float, world: World) -> None:
        before, now = _find_worker_ids(self._world), _find_worker_ids(world)
        # At a planned boundary the previous world may end without any event.
        self._stop_training(at, "planned")
        kind = self._classify_change() if before & now or not before else WorldChangeKind.RESTART
        self._changes.append(
            WorldChange(
                world.fence.generation, at, kind, len(before), len(now), len(now - before),
                len(before - now), world.reason, steps_lost=self._count_steps_lost(world),
            )
        )  # fmt: skip
        self._world = world

    def _classify_change(self) -> WorldChangeKind:
        if self._world is None:
            return WorldChangeKind.START
        return WorldChangeKind.LOSS if self._phase == "recovery" else WorldChangeKind.PLANNED

    def _complete_world(
        self, at: float, message: WorldFormed, state: DriverState | None
    ) -> WorldChange | None:
        """The change of the world, once its last member has built it; None before."""
        world = self._world
        if (
            world is None
            or state is None
            or state.workers.unformed
            or message.fence != world.fence
            or self._phase == "training"
        ):
            return None
        change = dataclasses.replace(self._changes[-1], seconds=at - self._phase_since)
        self._changes[-1] = change
        self._switch_phase(at, "training")
        return change

    def _leave_world(self, at: float, message: RequestNextWorld | WorkerDone) -> None:
        """The world stops training as soon as its first member leaves it."""
        if self._world is None or message.fence != self._world.fence:
            return
        if isinstance(message, WorkerDone):
            self._stop_training(at, "closing")
        else:
            self._stop_training(at, "planned" if message.planned else "recovery")

    def _stop_training(self, at: float, phase: str) -> None:
        """End the training phase. A loss during a planned change turns that into a recovery."""
        if self._phase == "training":
            self._switch_phase(at, phase)
        elif self._phase == "planned" and phase == "recovery":
            self._phase = phase

    def _switch_phase(self, at: float, phase: str) -> None:
        self._useful += self._sum_useful_seconds(at)
        self._phases[self._phase] += max(0.0, at - self._phase_since)
        self._phase, self._phase_since = phase, at

    def _sum_useful_seconds(self, at: float) -> float:
        if self._phase != "training" or self._world is None:
            return 0.0
        return self._world.size * max(0.0, at - self._phase_since)

    def _count_steps_lost(self, world: World) -> int | None:
        """Reported steps that the new world has to repeat; None if the program reports no steps."""
        if self._world is None:
            return 0
        if "step" not in self._metrics:
            return None
        resumed_from = _count_steps_before(world.start_position, int(self._metrics.get("steps", 0)))
        return max(0, count_steps(self._metrics) - resumed_from)

    def _add_entry(self, at: float, kind: str, text: str) -> None:
        times = 1
        if kind in MERGED_ENTRIES and self._entries and self._entries[-1].kind == kind:
            times += self._entries.pop().times
        self._entries.append(HistoryEntry(at, kind, text, times))


def _find_worker_ids(world: World | None) -> set[str]:
    return set() if world is None else {member.worker for member in world.members}


def _count_steps_before(position: Position | None, steps: int) -> int:
    """Applied steps before a position, in a run of `steps` per epoch."""
    if position is None:
        return 0
    return position.epoch * steps + (position.step if position.phase is Phase.TRAIN else steps)


def _split_words(name: str) -> str:
    """LaunchSlot -> launch slot."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
