"""The driver machine's state, and the turn in which one event changes it.

Everything in a `DriverState` is immutable but its own fields; a turn works on a shallow copy, which nobody changes
once the turn is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from spark_elastic.protocol.commands import DriverCommand
from spark_elastic.protocol.driver.blacklist import Blacklist
from spark_elastic.protocol.driver.registry import Gone, JobRecord, PutOff, SlotRecord, Unsure, WorkerRecord
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.protocol.table import Table
from spark_elastic.protocol.types import (
    Checkpoint,
    Fence,
    HostId,
    Limits,
    Position,
    SlotId,
    WorkerId,
    WorkerStatus,
    World,
)

K = TypeVar("K")


class Stage(Enum):
    GATHERING = "gathering"  # no world, and nobody left of one: the next begins from nothing
    RUNNING = "running"  # a world is published and not known to be broken
    REGROUPING = "regrouping"  # the world is over; its living members come, then the next is formed
    ENDED = "ended"


@dataclass(frozen=True)
class Failure:
    """A worker's own failure. generation 0: before it was in any world."""

    at: float
    generation: int
    worker: WorkerId
    position: Position | None
    fingerprint: str
    detail: str


@dataclass
class DriverState:
    """What the driver knows.

    absent, unformed: how many living members of the world have not come back from it / have not built it yet.
    waiting: warm newcomers, by order of arrival. cut: workers whose connection is broken, and since when.
    suspected: members that peers saw break in this world. late: those that were given up since they did not come to the
    regroup. hiccup: when last all workers were cut at once.
    scanned: when the leases were last looked at. deaf: when last the driver itself was cut off or asleep.
    slots_on, slots_of: living slots by host and by slot job. starting: how many workers have that status.
    stalled: members of this world that kept others waiting, and what they were doing.
    regroup_since: since when absent members are waited for. change_since: since when a planned change is wanted.
    began: when the first event came.
    starved: when workers were killed because memory ran out.
    fruitless_end: what the last slot job said that ended before its worker was warm.
    checkpoints: those that count, newest first. unsure: given up members that may be alive;
    unsure_in: numbers of their slot jobs.
    listed: discovery's newest answer. hosts: all that ever had a slot. early: orders that wait for the first world.
    kills: by slot, how many of its workers in a row were killed before they took
    part in a world. killed: when workers of a slot were. yielded: why slots were given back while there were too few.
    barred: slots that may not take part and are not sent back before the other attempts of their jobs (R14).
    put_off: those of `jobs` that are not launched yet.
    withheld: slot jobs that are not asked for before a member is lost. recall: one was.
    vain, vain_since: how many worlds in a row broke with nobody lost and no progress, and since when.
    short_since: since when there are too few workers. done_since: when the job's result was there.
    """

    limits: Limits
    attempt: int
    stage: Stage = Stage.GATHERING
    next_job: int = 1
    jobs: Table[int, JobRecord] = field(default_factory=Table)
    put_off: Table[int, PutOff] = field(default_factory=Table)
    slots: Table[SlotId, SlotRecord] = field(default_factory=Table)
    workers: Table[WorkerId, WorkerRecord] = field(default_factory=Table)
    gone_slots: Table[SlotId, str] = field(default_factory=Table)
    gone_workers: Table[WorkerId, Gone] = field(default_factory=Table)
    waiting: Table[WorkerId, None] = field(default_factory=Table)
    cut: Table[WorkerId, float] = field(default_factory=Table)
    draining_hosts: Table[HostId, str] = field(default_factory=Table)
    slots_on: Table[HostId, tuple[SlotId, ...]] = field(default_factory=Table)
    slots_of: Table[int, tuple[SlotId, ...]] = field(default_factory=Table)
    starting: int = 0
    listed: tuple[tuple[str, int], ...] | None = None
    hosts: frozenset[HostId] = frozenset()
    blacklist: Blacklist = field(default_factory=Blacklist)
    kills: Table[SlotId, int] = field(default_factory=Table)
    killed: Table[SlotId, tuple[float, ...]] = field(default_factory=Table)
    yielded: str = ""
    barred: Table[SlotId, None] = field(default_factory=Table)
    withheld: int = 0
    recall: bool = False
    early: tuple[DrainRequested, ...] = ()
    arrivals: int = 0
    draining: int = 0
    world: World | None = None
    generation: int = 0
    absent: int = 0
    unformed: int = 0
    suspected: frozenset[WorkerId] = frozenset()
    late: frozenset[WorkerId] = frozenset()
    stalled: Table[WorkerId, str] = field(default_factory=Table)
    results: Table[WorkerId, str] = field(default_factory=Table)
    version: int = 0
    announced: bool = False
    failures: tuple[Failure, ...] = ()
    starved: tuple[float, ...] = ()
    vain: int = 0
    vain_since: float = 0.0
    next_lease_scan: float = 0.0
    hiccup: float = float("-inf")
    scanned: float = float("inf")
    deaf: float = float("-inf")
    gather_since: float | None = None
    regroup_since: float | None = None
    published_at: float = 0.0
    change_since: float | None = None
    short_since: float | None = None
    done_since: float | None = None
    began: float | None = None
    because: str = ""
    fruitless_end: str = ""
    checkpoints: tuple[Checkpoint, ...] = ()
    unsure: Table[WorkerId, Unsure] = field(default_factory=Table)
    unsure_in: frozenset[str] = frozenset()

    @property
    def fence(self) -> Fence:
        """Of the last published world; generation 0 before the first."""
        return Fence(self.attempt, self.generation)

    @property
    def lacks_slots(self) -> bool:
        """Whether there is no world, and too few slots for one. Otherwise the job waits for its own workers alone."""
        usable = len(self.slots) - len(self.barred)
        return self.stage in (Stage.GATHERING, Stage.REGROUPING) and usable < self.limits.min_workers

    def copy(self) -> DriverState:
        """A shallow one. Every event makes one: `replace` would take ten times as long."""
        made = object.__new__(DriverState)
        made.__dict__.update(self.__dict__)
        return made


class Turn:
    """One event being answered: a private copy of the state, the time, and the commands so far."""

    __slots__ = ("commands", "now", "state")

    def __init__(self, state: DriverState, now: float) -> None:
        self.state = state.copy()
        self.now = now
        self.commands: list[DriverCommand] = []

    def say(self, command: DriverCommand) -> None:
        self.commands.append(command)

    def put(self, worker: WorkerRecord) -> None:
        state = self.state
        before = state.workers.get(worker.worker)
        was = before is not None and before.status is WorkerStatus.STARTING
        state.starting += (worker.status is WorkerStatus.STARTING) - was
        state.workers = state.workers.put(worker.worker, worker)

    def drop(self, worker: WorkerRecord) -> None:
        """Off the living."""
        state = self.state
        state.starting -= state.workers[worker.worker].status is WorkerStatus.STARTING
        state.workers = state.workers.drop(worker.worker)

    def put_slot(self, slot: SlotRecord) -> None:
        state = self.state
        if slot.slot not in state.slots:
            state.slots_on = state.slots_on.put(slot.host, (*state.slots_on.get(slot.host, ()), slot.slot))
            state.slots_of = state.slots_of.put(slot.job, (*state.slots_of.get(slot.job, ()), slot.slot))
        state.slots = state.slots.put(slot.slot, slot)

    def drop_slot(self, slot: SlotRecord) -> None:
        state = self.state
        state.slots = state.slots.drop(slot.slot)
        state.slots_on = _without(state.slots_on, slot.host, slot.slot)
        state.slots_of = _without(state.slots_of, slot.job, slot.slot)

    def slots_on(self, host: HostId) -> list[SlotRecord]:
        return [self.state.slots[slot] for slot in self.state.slots_on.get(host, ())]

    def slots_of(self, job: int) -> list[SlotRecord]:
        return [self.state.slots[slot] for slot in self.state.slots_of.get(job, ())]

    def survivors(self) -> list[WorkerRecord]:
        """Living members of the last world, in rank order (R4)."""
        return list(self._members())

    def anybody_survives(self) -> bool:
        return next(self._members(), None) is not None

    def newcomers(self) -> list[WorkerRecord]:
        """Warm workers outside the world that may be let in: in order of arrival, extra slots last (R14)."""
        found = [self.state.workers[worker] for worker in self.state.waiting]
        barred = self.state.barred
        usable = (w for w in found if not w.draining and w.slot not in barred and not self.cools(w))
        return sorted(usable, key=lambda worker: (worker.extra, worker.arrival))

    def count_newcomers(self) -> int:
        """How many `newcomers` has; without a look at each where all may be let in."""
        state = self.state
        return len(self.newcomers()) if state.blacklist or state.barred else len(state.waiting)

    def cools(self, worker: WorkerRecord) -> bool:
        """Its slot or host failed and is not used for a while."""
        blacklist = self.state.blacklist
        return bool(blacklist) and blacklist.slot_until(worker.slot, worker.host, self.now) is not None

    def title(self, worker: WorkerRecord) -> str:
        """How sentences name a worker."""
        place = f"rank {worker.rank} of world {self.state.generation}, " if worker.rank is not None else ""
        return f"worker {worker.worker} ({place}host {worker.host})"

    def _members(self) -> Iterator[WorkerRecord]:
        if self.state.world is None:
            return
        for member in self.state.world.members:
            worker = self.state.workers.get(member.worker)
            if worker is not None:
                yield worker


def _without(index: Table[K, tuple[SlotId, ...]], key: K, slot: SlotId) -> Table[K, tuple[SlotId, ...]]:
    left = tuple(name for name in index[key] if name != slot)
    return index.put(key, left) if left else index.drop(key)
