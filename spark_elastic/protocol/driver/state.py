"""What the driver machine knows of a job, and the transition in which one event changes it.

Each part of `DriverState` owns its fields, and changes its indexes and counters together with the records that they
count. A transition works on copies of the parts; values in the fields are immutable, so shallow copies suffice."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from spark_elastic.protocol import commands as do
from spark_elastic.protocol.driver.blacklist import Blacklist
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.protocol.messages import JOB_OVER
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    Checkpoint,
    Fence,
    HostId,
    Limits,
    MembershipVersion,
    Position,
    SlotId,
    Table,
    WorkerId,
    WorkerStatus,
    World,
)

K = TypeVar("K")
V = TypeVar("V")
P = TypeVar("P", bound="Part")
Results: TypeAlias = tuple[str, ...]  # JSON text, by rank


class Part:
    """A part of the state: a mutable object with immutable values in its fields."""

    def copy(self: P) -> P:
        """A shallow copy. Every event makes one of each part: `replace` would take ten times as long."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def is_same(self: P, other: P) -> bool:
        mine, others = self.__dict__, other.__dict__
        return all(value is others[name] for name, value in mine.items())


@dataclass
class _LiveRecords(Part, Mapping[K, V]):
    """A part that can be read as a mapping of the records of what is alive."""

    alive: Table[K, V] = field(default_factory=Table)  # the records; only the methods of the part change it

    def __getitem__(self, key: K) -> V:
        return self.alive[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self.alive)

    def __len__(self) -> int:
        return len(self.alive)

    def values(self) -> ValuesView[V]:
        return self.alive.values()

    def items(self) -> ItemsView[K, V]:
        return self.alive.items()


@dataclass(frozen=True)
class SlotLaunch:
    """A single-task Spark job that carries a slot, while it runs or waits to be launched."""

    number: int  # never used twice
    failed_predecessors: int = 0  # in a row, each of which ended without a warm worker
    slots: int = 0  # how many of its task's attempts are alive
    got_warm: bool = False  # an attempt brought a warm worker
    executor_lost: bool = False  # an attempt's host was lost
    held_back: bool = False  # once it has ended, no other launch follows before a member is lost


@dataclass
class Launches(_LiveRecords[int, SlotLaunch]):
    """Slot launches that run or are delayed, by number."""

    next_launch: int = 1  # the number of the next one
    delayed: Table[int, tuple[float, str]] = field(default_factory=Table)  # until when, and why
    held_back_count: int = 0  # how many are not asked for again before a member is lost
    relaunch: bool = False  # a member was lost, so those that are held back are asked for again
    preempted: str = ""  # why slots were given back although there are too few
    last_failure: str = ""  # what the last launch said that ended before its worker was warm
    other_releases: int = 0  # launches in a row that ended since another release is installed where they ran

    def put(self, launch: SlotLaunch) -> None:
        self.alive = self.alive.put(launch.number, launch)
        self.next_launch = max(self.next_launch, launch.number + 1)

    def remove(self, number: int) -> None:
        self.alive = self.alive.drop(number)

    def update(self, number: int, more_slots: int = 0, **changes: Any) -> None:
        """Change the record of a launch, if it is not over."""
        launch = self.get(number)
        if launch is not None:
            self.put(replace(launch, slots=launch.slots + more_slots, **changes))


@dataclass
class Hosts(Part):
    """Hosts that may carry slots, and the drain requests that concern them."""

    known: Table[HostId, str | None] = field(default_factory=Table)  # and its machine, if it had a slot
    discovered: tuple[tuple[str, int], ...] | None = None  # hosts and their slots; None: all, without limit
    draining: Table[HostId, str] = field(default_factory=Table)  # and why
    waiting_drains: tuple[DrainRequested, ...] = ()  # requests that wait for the first world

    def add(self, host: HostId, machine: str | None = None) -> bool:
        """Whether the host was not known before."""
        new = host not in self.known
        if new or machine is not None:
            self.known = self.known.put(host, machine)
        return new

    def find_usable(self) -> set[str]:
        """The hosts that discovery allows, and the names on its list of which no host is known yet. A host whose
        machine is not known may be on one that discovery lists."""
        if self.discovered is None:
            return set(self.known)
        listed = {name for name, _ in self.discovered}
        unseen = listed.difference(self.known, filter(None, self.known.values()))
        return unseen | {h for h, machine in self.known.items() if machine is None or listed & {h, machine}}


@dataclass(frozen=True)
class SlotRecord:
    """A slot task that is alive: one attempt of a launch's task."""

    slot: SlotId  # its own id
    launch: int  # the number of the `SlotLaunch` that carries it
    host: HostId  # the executor that carries it
    last_seen: float  # when its last heartbeat came
    extra: bool = False  # another attempt of its task was alive when it came: R14 (duplicates)
    worker: WorkerId | None = None  # a living one, spares not counted; None: none was announced since then
    disconnected_at: float | None = None  # since when its control connection is broken
    node: str = ""  # its machine's name
    unfit: str = ""  # why what its host runs cannot take part, "" if it can
    straggled_before: bool = False  # a worker of it was replaced, without which the others were quicker
    kept: Checkpoint | None = None  # newest commit in its host's memory when it came: R23 (kept commits)
    pace: float = 0.0  # seconds from one heartbeat to the next, as it was told with its newest one
    delay: float = 0.0  # seconds by which a heartbeat was late at most, which is forgotten by and by
    stack: str = ""  # where its worker was, which is stopped now; "" while it runs
    stopped_at: float | None = None  # when a heartbeat first said that its worker is stopped; None: it runs

    @property
    def machine(self) -> str:
        """Its machine, which local ranks count: slots of several executors may be on one."""
        return self.node or self.host


@dataclass
class Slots(_LiveRecords[SlotId, SlotRecord]):
    """Slots that are alive, by name."""

    _by_host: Table[HostId, tuple[SlotId, ...]] = field(default_factory=Table)  # so that none looks at all
    _by_launch: Table[int, tuple[SlotId, ...]] = field(default_factory=Table)  # the same, by launch
    departed: Table[SlotId, str] = field(default_factory=Table)  # gone or refused, and why
    excluded: Table[SlotId, None] = field(default_factory=Table)  # may not return yet: R14 (duplicates)

    def put(self, slot: SlotRecord) -> None:
        if slot.slot not in self.alive:
            self._by_host = self._by_host.put(slot.host, (*self._by_host.get(slot.host, ()), slot.slot))
            others = self._by_launch.get(slot.launch, ())
            self._by_launch = self._by_launch.put(slot.launch, (*others, slot.slot))
        self.alive = self.alive.put(slot.slot, slot)

    def record_departure(self, slot: SlotRecord, reason: str) -> None:
        """Record that the slot is gone. Its name is never used again."""
        self.alive = self.alive.drop(slot.slot)
        self._by_host = _remove(self._by_host, slot.host, slot.slot)
        self._by_launch = _remove(self._by_launch, slot.launch, slot.slot)
        self.excluded = self.excluded.drop(slot.slot)
        self.refuse(slot.slot, reason)

    def refuse(self, slot: SlotId, reason: str) -> None:
        self.departed = self.departed.put(slot, reason)

    def on_host(self, host: HostId) -> list[SlotRecord]:
        return [self.alive[slot] for slot in self._by_host.get(host, ())]

    def of_launch(self, launch: int) -> list[SlotRecord]:
        return [self.alive[slot] for slot in self._by_launch.get(launch, ())]

    def list_admitted(self) -> list[SlotRecord]:
        """Slots that may take part, as far as discovery allows them."""
        return [slot for slot in self.alive.values() if slot.slot not in self.excluded]


def _remove(index: Table[K, tuple[SlotId, ...]], key: K, slot: SlotId) -> Table[K, tuple[SlotId, ...]]:
    left = tuple(name for name in index[key] if name != slot)
    return index.put(key, left) if left else index.drop(key)


class DrainCause(Enum):
    """Why a worker drains."""

    HOST = "its host goes"
    NOT_DISCOVERED = "discovery does not list its host"  # undone once discovery lists it again
    BY_USER = "a user asked for it"  # its slot is not asked for again before a member is lost
    STRAGGLER = "the others are quicker without it"  # its slot's next worker, or another slot, replaces it


@dataclass(frozen=True)
class WorkerRecord:
    """A worker that is alive."""

    worker: WorkerId  # its own id
    slot: SlotId  # that its process runs in
    host: HostId  # as in its `SlotRecord`
    last_seen: float  # when it was last known to run
    status: WorkerStatus = WorkerStatus.STARTING  # the stage of its life, which the status page shows
    arrival: int = 0  # its number in the order in which newcomers came; 0: it has not come yet
    arrived_at: float = 0.0  # when it came as a newcomer
    rank: int | None = None  # in the newest world; None: it is no member of it
    formed: bool = False  # it has built that world's group
    has_left: bool = False  # it has left that world at `position`, by asking for the next or with a result
    position: Position | None = None  # of its state when it last left a world; None: it held or has left none
    draining: str = ""  # why it has to leave, "" if it stays
    drain_cause: DrainCause | None = None  # None if it stays
    extra: bool = False  # as in its `SlotRecord`

    @property
    def is_member(self) -> bool:
        """Whether it is a member of the newest world."""
        return self.rank is not None

    @property
    def took_part(self) -> bool:
        """Whether it has ever worked in a world, this one or an earlier one."""
        return self.is_member and (self.formed or self.position is not None)


@dataclass(frozen=True)
class DepartedWorker:
    """A worker that left or ended, was evicted, or was removed with its slot."""

    reason: str  # a sentence, with which later messages of the worker are answered
    event_id: str = ""  # of the event with which it departed
    exit_unreported: bool = False  # its slot has not reported its exit, which counts if it is a failure
    took_part: bool = False  # it had been in a world
    reported_end: bool = False  # by itself: its process has a moment for its functions of `atexit`


@dataclass
class Workers(_LiveRecords[WorkerId, WorkerRecord]):
    """Workers that are alive, by name, and how many of them are in a condition that forming a world waits for."""

    departed: Table[WorkerId, DepartedWorker] = field(default_factory=Table)  # for late messages
    departed_of: Table[SlotId, tuple[WorkerId, ...]] = field(default_factory=Table)  # their names, by slot
    waiting: Table[WorkerId, None] = field(default_factory=Table)  # warm newcomers in order of arrival
    arrivals: int = 0  # how many newcomers have come so far
    starting: int = 0  # workers that are not warm yet
    draining: int = 0  # workers that drain
    not_left: int = 0  # members of the newest world that have not left it
    unformed: int = 0  # members of the newest world that have not built its group

    def put(self, worker: WorkerRecord) -> None:
        self._count(self.alive.get(worker.worker), worker)
        self.alive = self.alive.put(worker.worker, worker)

    def set_last_seen(self, worker: WorkerRecord, now: float) -> WorkerRecord:
        """The renewed record of a worker that was seen to run."""
        seen = replace(worker, last_seen=now)
        self.alive = self.alive.put(worker.worker, seen)
        return seen

    def record_departure(self, worker: WorkerId, departed: DepartedWorker) -> None:
        """Record that the worker is gone, or what is new of one that is. Its name is never used again."""
        before = self.alive.get(worker)
        if before is not None:
            self._count(before, None)
            self.alive = self.alive.drop(worker)
        if worker not in self.departed:
            others = self.departed_of.get(worker.slot, ())
            self.departed_of = self.departed_of.put(worker.slot, (*others, worker))
        self.departed = self.departed.put(worker, departed)

    def _count(self, before: WorkerRecord | None, after: WorkerRecord | None) -> None:
        was, now = _find_conditions(before), _find_conditions(after)
        if was == now:
            return
        starting, draining, not_left, unformed, waiting = (b - a for a, b in zip(was, now, strict=True))
        self.starting += starting
        self.draining += draining
        self.not_left += not_left
        self.unformed += unformed
        if waiting > 0 and after is not None:
            self.waiting = self.waiting.put(after.worker, None)
        elif waiting < 0 and before is not None:
            self.waiting = self.waiting.drop(before.worker)


def _find_conditions(worker: WorkerRecord | None) -> tuple[bool, ...]:
    """Whether it is starting, draining, in its world, unformed and waiting, as `Workers` counts them."""
    if worker is None:
        return (False, False, False, False, False)
    member = worker.is_member
    return (
        worker.status is WorkerStatus.STARTING,
        bool(worker.draining),
        member and not worker.has_left,
        member and not worker.formed,
        worker.arrival > 0 and not member,
    )


@dataclass(frozen=True)
class PossiblyAlive:
    """An evicted member whose process may run on: R18 (publication)."""

    until: float  # by then it has ended itself because the driver was silent
    last_seen: float  # when it or its slot last spoke
    # Its connection or its slot's was closed while it still spoke. The kernel closes those of a process that dies;
    # those of a host that is cut off stay open.
    connection_closed: bool = False
    executor_lost: bool = False  # Spark says that its executor is lost


@dataclass
class PossiblyAliveMembers(Part):
    """Evicted members that are not known to be dead. A connection that was closed and an executor that is lost prove
    together that a member is dead; one of them alone does not."""

    members: Table[WorkerId, PossiblyAlive] = field(default_factory=Table)
    # By the launch of their slot, for most of ten thousand are of other launches. Some of them are dead by now.
    _by_launch: Table[int, tuple[WorkerId, ...]] = field(default_factory=Table)

    def add(self, worker: WorkerId, member: PossiblyAlive) -> None:
        self.update(worker, member)
        launch = worker.slot.launch
        self._by_launch = self._by_launch.put(launch, (*self._by_launch.get(launch, ()), worker))

    def update(self, worker: WorkerId, member: PossiblyAlive) -> None:
        if member.connection_closed and member.executor_lost:
            self.confirm_dead(worker)
        else:
            self.members = self.members.put(worker, member)

    def confirm_dead(self, worker: WorkerId) -> None:
        self.members = self.members.drop(worker)

    def find_by_connection(self, slot: SlotId, worker: WorkerId | None) -> dict[WorkerId, PossiblyAlive]:
        """Members that a connection speaks for: its worker, or, for a slot's connection, all that ran in the slot."""
        known = self._of_launch(slot.launch).items()
        return {n: m for n, m in known if n == worker or (worker is None and n.slot == slot)}

    def lose_executor(self, slot: SlotId) -> None:
        """Spark says that the slot's executor is lost, and may only have lost sight of it."""
        for worker, member in self.find_by_connection(slot, None).items():
            self.update(worker, replace(member, executor_lost=True))

    def end_launch(self, launch: int, executor_lost: bool) -> None:
        """A launch is over, and all attempts of its task, including those that were told to end before."""
        for worker, member in self._of_launch(launch).items():
            if executor_lost or member.executor_lost:
                self.update(worker, replace(member, executor_lost=True))
            else:
                self.confirm_dead(worker)
        if not self._of_launch(launch):
            self._by_launch = self._by_launch.drop(launch)

    def _of_launch(self, launch: int) -> dict[WorkerId, PossiblyAlive]:
        known = self.members
        return {name: known[name] for name in self._by_launch.get(launch, ()) if name in known}


@dataclass
class Connections(Part):
    """What the failure detector knows of control connections and of the driver's own pauses."""

    disconnected: Table[WorkerId, float] = field(default_factory=Table)  # workers, and since when
    unstarted: Table[WorkerId, None] = field(default_factory=Table)  # of those, the ones that still start
    reset: frozenset[WorkerId | SlotId] = frozenset()  # whose last connection no kernel closed: it was reset
    broke_at: float = float("-inf")  # when last the connection of a worker broke
    heard_at: float = float("-inf")  # when last a message came from anybody
    mass_disconnect_at: float = float("-inf")  # when last all workers were disconnected together
    driver_partitioned_at: float = float("-inf")  # when last the driver itself was cut off or paused
    driver_late_at: float = float("-inf")  # the same, also for a moment
    waited_at: float = float("-inf")  # when last a slot said that its member waits for others
    bitwise: bool = False  # whether that member's steps have the same bits, whichever workers compute them
    witnessed_since: float = float("-inf")  # since when slots have said so with short gaps
    last_lease_check: float = float("inf")  # when the leases were last checked
    next_lease_check: float = 0.0  # the first tick from this time on checks them

    def forget(self, name: WorkerId | SlotId) -> None:
        """The worker or slot is gone."""
        if isinstance(name, WorkerId):
            self.mark_connected(name)
        self.reset -= {name}

    def mark_connected(self, worker: WorkerId) -> None:
        self.disconnected = self.disconnected.drop(worker)
        self.unstarted = self.unstarted.drop(worker)


def add_time(times: tuple[float, ...], now: float, window: float) -> tuple[float, ...]:
    """With now, and without those that are older than the window."""
    return (*(at for at in times if at >= now - window), now)


@dataclass(frozen=True)
class WorkerFailure:
    """A failure that is a worker's own."""

    at: float  # when the driver learned of it
    generation: int  # 0: before it was in any world
    worker: WorkerId  # usually departed by now
    position: Position | None  # where it raised, or, for an exit, where its world began; None: the beginning
    fingerprint: str  # of the exception; "" if there was none
    detail: str  # the traceback, or a sentence
    crash: str = ""  # how and where native code ended it, "" if nothing did
    host: HostId = ""  # where that was, "" if its slot is gone
    is_exit: bool = False  # the function ended the process itself; the fingerprint names the exit code


@dataclass
class FailureHistory(Part):
    """Failures, kills and worlds without progress, as far as they still count."""

    records: tuple[WorkerFailure, ...] = ()  # within the failure window, oldest first
    oom_kills: tuple[float, ...] = ()  # when workers were killed because memory ran out
    kills_in_a_row: Table[SlotId, int] = field(default_factory=Table)  # of workers that had not taken part
    kill_times: Table[SlotId, tuple[float, ...]] = field(default_factory=Table)  # of the slot's workers
    silences: Table[SlotId, tuple[float, ...]] = field(default_factory=Table)  # when its workers fell silent
    externally_lost: Table[WorkerId, int] = field(default_factory=Table)  # from which world, by no fault
    worlds_without_progress: int = 0  # in a row: they broke, lost no member and came no further
    without_progress_since: float = 0.0  # when the first of these worlds was counted
    broken_links: tuple[frozenset[WorkerId], ...] = ()  # in these worlds
    left_out_at: Position | None = None  # where a member at a dead link was left out last

    @property
    def generations_with_losses(self) -> frozenset[int]:
        """Worlds that lost a member for an external reason. What other members raise there, or how they crash, may be
        a consequence of that, as errors of NCCL are."""
        return frozenset(self.externally_lost.values())

    def add_kill(self, slot: SlotId, took_part: bool, now: float, window: float) -> tuple[int, int]:
        """How many workers of the slot were killed in a row before they took part, and how many within the window."""
        in_a_row = 0 if took_part else self.kills_in_a_row.get(slot, 0) + 1
        times = add_time(self.kill_times.get(slot, ()), now, window)
        self.kills_in_a_row = self.kills_in_a_row.put(slot, in_a_row)
        self.kill_times = self.kill_times.put(slot, times)
        return in_a_row, len(times)

    def forget_slot(self, slot: SlotId) -> None:
        self.kills_in_a_row = self.kills_in_a_row.drop(slot)
        self.silences = self.silences.drop(slot)
        self.kill_times = self.kill_times.drop(slot)


class JobStage(Enum):
    GATHERING = "gathering"  # no world, and no survivor of one: the next begins without a member's state
    RUNNING = "running"  # a world is published and not known to be broken
    REGROUPING = "regrouping"  # the world is over; its living members come, then the next is formed
    ENDED = "ended"


@dataclass
class CurrentWorld(Part):
    """The newest world, the changes announced to it, and its condition."""

    world: World | None = None  # kept while the next is formed; None before the first
    generation: int = 0  # of the last published world; 0 before the first
    version: MembershipVersion = INITIAL_VERSION  # of the newest announced change
    announced: bool = False  # the world was told to stop at its next boundary
    end_announced: bool = False  # and that this boundary is the job's last
    break_reason: str = ""  # why the world broke, "" if it did not
    broken_by: str = ""  # the id of the event that broke it, "" if none did
    cause_unknown: bool = False  # `break_reason` is what a survivor saw: not who was lost, and how
    suspected: frozenset[WorkerId] = frozenset()  # members that a peer blames for its broken group
    broken_links: tuple[frozenset[WorkerId], ...] = ()  # two members each, one of which blames the other
    late: frozenset[WorkerId] = frozenset()  # members evicted because they did not come to the regroup
    stalled: Table[WorkerId, str] = field(default_factory=Table)  # members that kept others waiting, and how
    results: Table[WorkerId, str] = field(default_factory=Table)  # JSON text, by members that returned

    def enter(self, world: World) -> None:
        """A new world was published."""
        self.world = world
        self.announced = self.end_announced = self.cause_unknown = False
        self.break_reason = self.broken_by = ""
        self.suspected = self.late = frozenset()
        self.broken_links = ()
        self.stalled, self.results = Table(), Table()


@dataclass
class Timers(Part):
    """Times from which deadlines count; None where nothing is waited for."""

    began: float | None = None  # the first event came
    gather_since: float | None = None  # there is a newcomer, and no world
    published_at: float = 0.0  # the newest world was published
    change_since: float | None = None  # a planned change is wanted
    leaving_since: float | None = None  # members leave the world: it broke, or the first left as planned
    too_few_since: float | None = None  # there are too few workers
    too_few_notified: bool = False  # the user knows that there are too few workers
    done_since: float | None = None  # the job's result is there


@dataclass
class DriverState(Part):
    """Everything that the driver knows about a job. Times are monotonic seconds, in the sense of `Event.now`."""

    limits: Limits  # never changes
    attempt: int  # of this driver, the first half of every fence; never changes
    stage: JobStage = JobStage.GATHERING  # ENDED is final
    checkpoints: tuple[Checkpoint, ...] = ()  # the published ones, newest first
    checkpoints_kept: int | None = None  # how many the full store has room for; None: as many as `limits` say
    newest_store_full: tuple[WorkerId, int] | None = None  # sender and number of that `CheckpointStoreFull`
    blacklist: Blacklist = field(default_factory=Blacklist)  # what cools down after failures
    launches: Launches = field(default_factory=Launches)  # slot launches that run or are delayed
    hosts: Hosts = field(default_factory=Hosts)  # that may carry slots, or drain
    slots: Slots = field(default_factory=Slots)  # slot tasks that are alive
    workers: Workers = field(default_factory=Workers)  # that are alive, spares not counted
    possibly_alive: PossiblyAliveMembers = field(default_factory=PossiblyAliveMembers)  # evicted ones
    connections: Connections = field(default_factory=Connections)  # for the failure detector
    failures: FailureHistory = field(default_factory=FailureHistory)  # that still count
    current: CurrentWorld = field(default_factory=CurrentWorld)  # the newest world
    timers: Timers = field(default_factory=Timers)  # from which deadlines count

    @property
    def world(self) -> World | None:
        """The newest world."""
        return self.current.world

    @property
    def generation(self) -> int:
        return self.current.generation

    @property
    def fence(self) -> Fence:
        """Of the last published world; generation 0 before the first."""
        return Fence(self.attempt, self.current.generation)

    @property
    def lacks_slots(self) -> bool:
        """Whether there is no world, and too few slots for one. Otherwise the job waits for its own workers alone."""
        usable = len(self.slots) - len(self.slots.excluded)
        return self.stage in (JobStage.GATHERING, JobStage.REGROUPING) and usable < self.limits.min_workers

    def copy(self) -> DriverState:
        copied = super().copy()
        values = copied.__dict__
        for name in PARTS:
            values[name] = values[name].copy()
        return copied

    def is_same(self, other: DriverState) -> bool:
        """Whether no value differs, so that the events between the two states had no effect."""
        mine, others = self.__dict__, other.__dict__
        return all(mine[name] is others[name] for name in VALUES) and all(
            mine[name].is_same(others[name]) for name in PARTS
        )


VALUES = ("limits", "attempt", "stage", "checkpoints", "checkpoints_kept", "newest_store_full", "blacklist")
PARTS = tuple(each.name for each in fields(DriverState) if each.name not in VALUES)


class Transition:
    """The answer to one event: a private copy of the state, the event's time and id, and the commands so far."""

    __slots__ = ("commands", "event_id", "now", "state")

    def __init__(self, state: DriverState, now: float, event_id: str = "") -> None:
        self.state = state.copy()
        self.now, self.event_id = now, event_id
        self.commands: list[do.DriverCommand] = []

    def emit(self, command: do.DriverCommand) -> None:
        self.commands.append(command)

    def cite(self, sentence: str, earlier: str = "") -> str:
        """The sentence with the id of this event, and of an earlier one: one search for an id finds the whole story."""
        ids = ", ".join(dict.fromkeys(filter(None, (earlier, self.event_id))))
        return f"{sentence} ({ids})" if ids else sentence

    def end(self, outcome: do.JobOutcome, reason: str, detail: str = "", results: Results = ()) -> None:
        """The job is over: tell all workers and slots, then the caller."""
        state = self.state
        if state.stage is JobStage.ENDED:
            return
        state.stage, reason = JobStage.ENDED, self.cite(reason)
        told = f"{JOB_OVER} ({outcome.value}): {reason}"
        self.commands += [do.StopWorker(told, worker) for worker in state.workers]
        self.commands += [do.ReleaseSlot(told, slot) for slot in state.slots]
        self.emit(do.End(reason, outcome, results, detail))

    def find_worker(self, slot: SlotRecord) -> WorkerRecord | None:
        return self.state.workers.get(slot.worker) if slot.worker is not None else None

    def list_survivors(self) -> list[WorkerRecord]:
        """Living members of the last world, in rank order: R4 (survivors)."""
        return list(self._iter_members())

    def has_survivors(self) -> bool:
        return next(self._iter_members(), None) is not None

    def list_newcomers(self) -> list[WorkerRecord]:
        """Warm workers that may enter the world, in order of arrival; extra attempts come last: R14 (duplicates)."""
        state = self.state
        excluded, blacklist = state.slots.excluded, state.blacklist
        waiting = [state.workers[worker] for worker in state.workers.waiting]
        usable = [w for w in waiting if not w.draining and w.slot not in excluded]
        if blacklist:
            cut_off = self._find_cut_off()
            usable = [w for w in usable if blacklist.find_slot_return(w.slot, w.host, self.now) is None]
            usable = [w for w in usable if not cut_off or state.slots[w.slot].machine not in cut_off]
        return sorted(usable, key=lambda worker: (worker.extra, worker.arrival))

    def count_newcomers(self) -> int:
        """How many `list_newcomers` has, computed without the list if every waiting worker may enter."""
        state = self.state
        if state.blacklist or state.slots.excluded:
            return len(self.list_newcomers())
        return len(state.workers.waiting)

    def describe(self, worker: WorkerRecord) -> str:
        """The worker's name with its place, for messages."""
        place = f"rank {worker.rank} of world {self.state.generation}, " if worker.rank is not None else ""
        return f"worker {worker.worker} ({place}host {worker.host})"

    def _find_cut_off(self) -> set[str]:
        """The machines that cannot reach those of all members."""
        slots, blacklist = self.state.slots, self.state.blacklist
        if not blacklist.links:
            return set()
        members = {slots[worker.slot].machine for worker in self._iter_members()}
        return blacklist.find_unreachable(members, self.now)

    def _iter_members(self) -> Iterator[WorkerRecord]:
        world = self.state.world
        for member in world.members if world is not None else ():
            worker = self.state.workers.get(member.worker)
            if worker is not None:
                yield worker
