"""The driver machine's state, and the turn in which one event changes it.

A turn works on a shallow copy of the state, which nobody changes once the turn is over. All values in the fields are
immutable, so a shallow copy is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from spark_elastic.protocol.commands import DriverCommand
from spark_elastic.protocol.driver.blacklist import Blacklist
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

# The driver machine's records of slot jobs, slots and workers, alive or gone. Values only.


class Leave(Enum):
    """Why a worker drains."""

    HOST = "its host goes"
    UNLISTED = "its host is not listed"  # undone once it is listed again
    BY_HAND = "it was asked to"  # its slot is not asked for again before a member is lost


@dataclass(frozen=True)
class JobRecord:
    """A slot job that is alive, or will be launched."""

    job: int
    fruitless: int = 0  # how many of its predecessors in a row ended without a warm worker
    slots: int = 0  # how many of its attempts are alive
    warmed: bool = False  # an attempt brought a warm worker
    host_lost: bool = False  # an attempt's host was lost
    withheld: bool = False  # once it has ended, no other job follows it before a member is lost


@dataclass(frozen=True)
class PutOff:
    """A slot job that is launched later."""

    until: float
    reason: str  # why it is launched at all


@dataclass(frozen=True)
class SlotRecord:
    """A slot task that is alive."""

    slot: SlotId
    job: int
    host: HostId
    heard: float  # when its last beat came
    extra: bool = False  # another attempt of its job was alive when it came (R14)
    worker: WorkerId | None = None
    cut: float | None = None  # since when its control connection is broken
    node: str = ""  # its machine's name
    unfit: str = ""  # why what its host runs cannot take part, "" if it can


@dataclass(frozen=True)
class WorkerRecord:
    """A living worker."""

    worker: WorkerId
    slot: SlotId
    host: HostId
    heard: float  # when it was last known to run
    status: WorkerStatus = WorkerStatus.STARTING
    arrival: int = 0  # its number in the order in which newcomers came; 0: it has not come yet
    rank: int | None = None  # in the newest world; None: it is no member
    formed: bool = False  # it has built that world
    came: bool = False  # it has left that world, by a join or a result, at `position`
    position: Position | None = None
    draining: str = ""  # why it shall leave, "" if it need not
    leave: Leave | None = None  # of which kind that reason is
    arrived: float = 0.0  # when it came as a newcomer
    extra: bool = False  # as in its `SlotRecord`


class SlotEnd(Enum):
    """How a slot task is known to be gone."""

    SEEN = "it ended"  # and whatever ran in it
    TOLD = "it was told to end, or will be once it speaks"
    DISOWNED = "its executor is lost"  # says Spark, which may only have lost sight of it


@dataclass(frozen=True)
class Unsure:
    """A member that was given up and may be alive (R18)."""

    until: float  # by then it has ended itself because the driver was silent
    heard: float  # when it or its slot last spoke
    # Its connection or its slot's was closed while it still spoke: so is a dying process's, not that of a host cut off.
    hung_up: bool = False
    disowned: bool = False  # Spark says that its executor is lost


@dataclass(frozen=True)
class Gone:
    """A worker that ended or was given up."""

    reason: str
    status: WorkerStatus
    liable: bool = False  # a failed exit that its slot reports later is a failure of its own, not yet counted
    took_part: bool = False  # it had been in a world


K = TypeVar("K")


class Stage(Enum):
    GATHERING = "gathering"  # no world, and nobody left of one: the next begins from nothing
    RUNNING = "running"  # a world is published and not known to be broken
    REGROUPING = "regrouping"  # the world is over; its living members come, then the next is formed
    ENDED = "ended"


@dataclass(frozen=True)
class Failure:
    """A worker's own failure. generation 0: before it was in any world. crash: how and where native code ended it, ""
    if nothing did. host: where that was, "" if its slot is gone."""

    at: float
    generation: int
    worker: WorkerId
    position: Position | None
    fingerprint: str
    detail: str
    crash: str = ""
    host: HostId = ""


@dataclass
class DriverState:
    """What the driver knows of a job. Times are monotonic seconds, in the sense of `Event.now`."""

    limits: Limits
    attempt: int
    stage: Stage = Stage.GATHERING
    began: float | None = None  # when the first event came

    # Slot jobs
    next_job: int = 1  # the number of the next one
    jobs: Table[int, JobRecord] = field(default_factory=Table)  # that are alive, or put off
    put_off: Table[int, PutOff] = field(default_factory=Table)  # those of `jobs` that are not launched yet
    withheld: int = 0  # how many are not asked for again before a member is lost
    recall: bool = False  # a member was lost, so those that are withheld are asked for again
    yielded: str = ""  # why slots were given back although there are too few
    fruitless_end: str = ""  # what the last one said that ended before its worker was warm

    # Hosts and slots
    slots: Table[SlotId, SlotRecord] = field(default_factory=Table)  # that are alive
    slots_on: Table[HostId, tuple[SlotId, ...]] = field(default_factory=Table)  # the same by host
    slots_of: Table[int, tuple[SlotId, ...]] = field(default_factory=Table)  # the same by slot job
    gone_slots: Table[SlotId, str] = field(default_factory=Table)  # and why
    barred: Table[SlotId, None] = field(default_factory=Table)  # take no part, but must not return yet (R14)
    hosts: frozenset[HostId] = frozenset()  # all that ever had a slot, or appeared
    listed: tuple[tuple[str, int], ...] | None = None  # discovery's newest answer: hosts and their slots
    draining_hosts: Table[HostId, str] = field(default_factory=Table)  # and why
    early: tuple[DrainRequested, ...] = ()  # orders that wait for the first world
    blacklist: Blacklist = field(default_factory=Blacklist)
    kills: Table[SlotId, int] = field(default_factory=Table)  # workers killed in a row before they took part
    killed: Table[SlotId, tuple[float, ...]] = field(default_factory=Table)  # when workers were killed

    # Workers
    workers: Table[WorkerId, WorkerRecord] = field(default_factory=Table)  # that are alive
    gone_workers: Table[WorkerId, Gone] = field(default_factory=Table)
    starting: int = 0  # how many of `workers` have that status
    draining: int = 0  # how many of `workers` drain
    waiting: Table[WorkerId, None] = field(default_factory=Table)  # warm newcomers in order of arrival
    arrivals: int = 0  # how many newcomers have come so far
    failures: tuple[Failure, ...] = ()
    starved: tuple[float, ...] = ()  # when workers were killed because memory ran out
    unsure: Table[WorkerId, Unsure] = field(default_factory=Table)  # given up members that may be alive (R18)
    unsure_of: Table[str, tuple[WorkerId, ...]] = field(default_factory=Table)  # by slot job; some no more

    # The world
    world: World | None = None  # the newest
    generation: int = 0
    version: int = 0  # of the membership: grows with each announced change
    announced: bool = False  # the world was told to stop at its next boundary
    absent: int = 0  # living members that have not come back from it
    unformed: int = 0  # living members that have not built it yet
    suspected: frozenset[WorkerId] = frozenset()  # members that peers saw break
    late: frozenset[WorkerId] = frozenset()  # members given up because they did not come to the regroup
    stalled: Table[WorkerId, str] = field(default_factory=Table)  # members that kept others waiting, and how
    results: Table[WorkerId, str] = field(default_factory=Table)
    because: str = ""  # why it broke
    taken: Table[WorkerId, int] = field(
        default_factory=Table
    )  # whom a signal or a host's end took of which world
    vain: int = 0  # how many worlds in a row broke with nobody lost and no progress
    vain_since: float = 0.0
    checkpoints: tuple[Checkpoint, ...] = ()  # that count, newest first

    # Connections and leases
    cut: Table[WorkerId, float] = field(default_factory=Table)  # whose connection is broken, and since when
    unclosed: frozenset[str] = frozenset()  # workers and slots whose last one was reset or timed out
    hiccup: float = float("-inf")  # when last all workers were cut at once
    deaf: float = float("-inf")  # when last the driver itself was cut off or asleep
    scanned: float = float("inf")  # when the leases were last looked at
    next_lease_scan: float = 0.0

    # Deadlines count from these
    gather_since: float | None = None  # there is a newcomer, and no world
    published_at: float = 0.0  # the newest world
    change_since: float | None = None  # a planned change is wanted
    regroup_since: float | None = None  # absent members are waited for
    short_since: float | None = None  # there are too few workers
    done_since: float | None = None  # the job's result is there

    @property
    def fence(self) -> Fence:
        """Of the last published world; generation 0 before the first."""
        return Fence(self.attempt, self.generation)

    @property
    def bereft(self) -> frozenset[int]:
        """Worlds of which somebody was taken. What others raise there, or crash of, may only tell of that, as errors of
        NCCL do."""
        return frozenset(self.taken.values())

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
