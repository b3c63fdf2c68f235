"""The nouns of the elastic protocol: fences, positions, worlds and limits.

Pure values without behaviour of their own; shared by driver, workers, the wire and the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import TypeAlias

WorkerId: TypeAlias = str  # one training process, never used twice in a job: "<slot>.<n>"
SlotId: TypeAlias = str  # one attempt of a slot task, never used twice in a job: "<job number>-<attempt>"
HostId: TypeAlias = str  # one live executor


def slot_of(worker: WorkerId) -> SlotId:
    """The slot that the worker ran in."""
    return worker.rpartition(".")[0]


def worker_number(worker: WorkerId) -> int:
    """The worker's number within its slot, from 1; 0 for a name that has none."""
    return _number(worker.rpartition(".")[2])


def launch_of(name: SlotId | WorkerId) -> int:
    """The number of the launch whose task the slot, or the worker's slot, is an attempt of; 0 for a name without."""
    return _number(name.partition("-")[0])


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


NOT_RUNNING = frozenset(
    "TZX"
)  # letters of process states in which a process does not run: stopped, zombie, dead
# Exit code of a worker that ended itself under R12 (driver silence). Crashing programs choose smaller codes.
DRIVER_SILENT_EXIT_CODE = 75
# Exit codes of processes that a signal killed, or that ended themselves because the driver was silent.
KILLED_EXIT_CODES = (-9, -15, DRIVER_SILENT_EXIT_CODE)


@dataclass(frozen=True, order=True)
class Fence:
    """R10: what every message carries. A driver that opens a run takes an `attempt`; worlds count generations."""

    attempt: int
    generation: int


class Phase(IntEnum):
    """The part of an epoch that a run is in, in their order."""

    TRAIN = 0
    VALIDATE = 1
    CLOSE = 2


@dataclass(frozen=True, order=True)
class Position:
    """Where a run stands: the next step to take. Totally ordered; part of the state."""

    epoch: int
    phase: Phase
    step: int


START = Position(0, Phase.TRAIN, 0)
LAST_CHANGE = 1 << 40  # membership versions from here on mean: the job ends at this boundary


def is_last(version: int) -> bool:
    """Whether the change of that membership version is the job's end (R6: all ranks see it at the same boundary)."""
    return version >= LAST_CHANGE


@dataclass(frozen=True)
class Member:
    """One worker's place in a world. `position` is what it brought along; None for a newcomer."""

    worker: WorkerId
    slot: SlotId
    host: HostId
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    position: Position | None


@dataclass(frozen=True)
class Checkpoint:
    """A state that was made durable: by a member of world `fence`, at `position`. digest: of its manifest."""

    fence: Fence
    position: Position
    name: str
    digest: str


@dataclass(frozen=True)
class World:
    """The workers of one generation, in rank order (members[i].rank == i).

    `source` is the rank whose state the others take: a survivor at the highest position (R4); None where nobody
    brings a position, that is where all begin from the same initial state. `version` is the membership version that
    it was formed at: its members stop at a boundary once a trailer carries a higher one (R6), so that all of them
    compare with the same number. `resume`: where nobody brings a position but checkpoints count, the newest first:
    the source loads the first that is whole and hands it to all.
    """

    fence: Fence
    members: tuple[Member, ...]
    source: int | None
    reason: str
    version: int = 0
    resume: tuple[Checkpoint, ...] = ()

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def position(self) -> Position | None:
        """The position that its source stands at; None: it begins from the beginning or from a checkpoint."""
        return None if self.source is None else self.members[self.source].position

    @property
    def start_position(self) -> Position | None:
        """Its source's position or, if it begins from a checkpoint, the newest one's; None: the beginning."""
        return self.resume[0].position if self.resume else self.position

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that do not stand at `position` and take the source's state; empty: no broadcast at all."""
        if self.resume:
            return tuple(range(self.size))
        position = self.position
        return tuple(m.rank for m in self.members if m.position != position)

    def member(self, worker: WorkerId) -> Member | None:
        return self._by_worker.get(worker)

    @cached_property
    def _by_worker(self) -> dict[WorkerId, Member]:
        return {member.worker: member for member in self.members}


class WorkerStatus(Enum):
    """Lifecycle of a worker as the driver sees it."""

    STARTING = "starting"  # its process was announced
    WARM = "warm"  # imported, waits for its first world
    JOINING = "joining"  # named in a published world, not yet seen running in it
    RUNNING = "running"  # built the generation it is a member of
    READY = "ready"  # left its world at a known position and waits for the next
    SUCCESS = "success"
    FAILURE = "failure"  # raised, died, or was given up


@dataclass(frozen=True)
class Limits:
    """What bounds a job. Times in seconds.

    num_workers: slots wanted at the start (R16); min_workers: fewest to go on with; max_workers: most ever.
    gather_timeout: how long the start waits for `num_workers` once `min_workers` are there.
    start_timeout: how long to wait for `min_workers`, at the start and after a loss.
    lease: silence after which a worker is taken for lost. reconnect_grace: how long a broken control connection
    alone may stay broken. same_moment: connections that break within it are judged together.
    driver_timeout: a worker that has not heard the driver for so long has ended itself.
    regroup_timeout: how long survivors wait for a member that runs but does not come.
    debounce: how long a planned change waits for others to join it, where some may.
    failure_budget within failure_window: worker failures that are their own (not of a lost host).
    reset_limit: plain count of new worlds after the first, as Horovod counts, after which no change is planned; None:
    unlimited.
    cooldown_range: for how long a slot or host is not used after its first failure, and at most after many.
    idle_slot_timeout: after so long a slot that no world needs gives its core back.
    max_global_batch: world size never exceeds it (R8).
    checkpoints_kept: how many count at a time.
    max_runtime: after so long the job ends at its next step boundary; None: unlimited.
    all_results: a success needs the result of every member (R15); False: rank 0's is the job's.
    """

    num_workers: int
    min_workers: int
    max_workers: int
    gather_timeout: float = 10.0
    start_timeout: float = 600.0
    lease: float = 5.0
    reconnect_grace: float = 1.0
    driver_timeout: float = 60.0
    disconnect_window: float = 0.05
    regroup_timeout: float = 600.0
    debounce: float = 0.05
    failure_budget: int = 10
    failure_window: float = 600.0
    reset_limit: int | None = None
    max_global_batch: int | None = None
    cooldown_range: tuple[float, float] = (1.0, 60.0)
    idle_slot_timeout: float = 60.0
    checkpoints_kept: int = 3
    max_runtime: float | None = None
    all_results: bool = False

    @property
    def capacity(self) -> int:
        """The largest world. R8 (weighting): never more workers than rows in a step."""
        if self.max_global_batch is None:
            return self.max_workers
        return min(self.max_workers, self.max_global_batch)

    @property
    def wanted_at_start(self) -> int:
        """R16 (start): with so many workers the first world begins at once."""
        return min(self.num_workers, self.capacity)


MAX_HEARTBEAT_INTERVAL = 1.0  # seconds, in a small job with an ordinary lease
HEARTBEATS_PER_LEASE = 5  # in a small job
# In any job. One of them may be lost, and half a lease without any shows that the driver is cut off: R12 (driver
# silence).
MIN_HEARTBEATS_PER_LEASE = 2.5
HEARTBEATS_PER_SECOND = 250  # of all slots together, about a quarter of what one core serves


def heartbeat_interval(lease: float, slots: int) -> float:
    """Seconds between two heartbeats of each of so many slots: it grows with them, and the lease bounds it."""
    small_job = min(MAX_HEARTBEAT_INTERVAL, lease / HEARTBEATS_PER_LEASE)
    return max(small_job, min(slots / HEARTBEATS_PER_SECOND, lease / MIN_HEARTBEATS_PER_LEASE))
