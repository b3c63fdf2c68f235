"""The values of the elastic protocol, shared by driver, workers, the wire and the simulation."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum, IntFlag
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from spark_elastic.config import ElasticConfig

if TYPE_CHECKING:
    from typing_extensions import Self

HostId: TypeAlias = str  # one live executor


class _Id(str):
    """Text, so that messages and logs carry it as it is. Other text is refused."""

    __slots__ = ()
    _FORMAT: ClassVar[re.Pattern[str]]
    _KIND: ClassVar[str]

    def __new__(cls, text: str) -> Self:
        if cls._FORMAT.fullmatch(text) is None:
            raise ValueError(f"{text!r} is no {cls._KIND}")
        return super().__new__(cls, text)


class SlotId(_Id):
    """One of Spark's attempts of a slot task, never used twice in a job."""

    __slots__ = ()
    _FORMAT = re.compile(r"\d+-\d+", re.ASCII)
    _KIND = 'slot id, "<launch>-<attempt>"'

    @classmethod
    def build(cls, launch: int, attempt: int) -> Self:
        return cls(f"{launch}-{attempt}")

    @property
    def launch(self) -> int:
        """The number of the launch whose task the slot is an attempt of."""
        return int(self.partition("-")[0])


class WorkerId(_Id):
    """One training process, never used twice in a job."""

    __slots__ = ()
    _FORMAT = re.compile(r"\d+-\d+\.\d+", re.ASCII)
    _KIND = 'worker id, "<launch>-<attempt>.<number>"'

    @classmethod
    def build(cls, slot: SlotId, number: int) -> Self:
        return cls(f"{slot}.{number}")

    @property
    def slot(self) -> SlotId:
        """The slot that the worker ran in."""
        return str.__new__(SlotId, self.rpartition(".")[0])  # its form was checked with the whole

    @property
    def number(self) -> int:
        """The worker's number within its slot, from 1."""
        return int(self.rpartition(".")[2])


SLOT_LINE_PREFIX = "spark_elastic: "  # begins a slot's own log line, which the driver always logs
STOPPED = "T"  # letter of the state of a process that a signal has stopped
NOT_RUNNING = frozenset((STOPPED, "Z", "X"))  # of all states in which a process does not run: zombie, dead
# Exit code of a worker that ended itself under R12 (driver silence). Crashing programs choose smaller codes.
DRIVER_SILENT_EXIT_CODE = 75
# Exit codes of processes that a signal killed, or that ended themselves because the driver was silent.
KILLED_EXIT_CODES = (-9, -15, DRIVER_SILENT_EXIT_CODE)


@dataclass(frozen=True, order=True)
class Fence:
    """R10 (fence): identifies a world. Messages about an older world are ignored."""

    attempt: int  # the driver's: one that opens a run takes the next number
    generation: int  # of the world; 0 before the first


class Phase(IntEnum):
    """The part of an epoch that a run is in, in their order."""

    TRAIN = 0
    VALIDATE = 1
    CLOSE = 2


@dataclass(frozen=True, order=True)
class Position:
    """Where a run stands: the next step to take. Totally ordered; part of the state."""

    epoch: int  # from 0
    phase: Phase  # the part of the epoch
    step: int  # from 0 in each phase


START = Position(0, Phase.TRAIN, 0)


class HostUpdateResult(IntFlag):
    """What a planned change does, under Horovod's names: whether workers leave, join, or both."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


@dataclass(frozen=True, order=True)
class MembershipVersion:
    """Which planned changes of a job's workers have been announced; it grows with each of them, over all worlds. Ranks
    agree on the highest that any of them knows, and so on what it does, at one boundary: R6 (step summary)."""

    number: int = 0  # of the newest change; 0: none was announced yet
    job_ends: bool = False  # the change is the job's end
    update: HostUpdateResult = HostUpdateResult.no_update  # what the change does

    def next(
        self, *, job_ends: bool = False, update: HostUpdateResult = HostUpdateResult.no_update
    ) -> MembershipVersion:
        """The version of the change that is announced after this one."""
        return MembershipVersion(self.number + 1, job_ends, update)

    def encode(self) -> int:
        """As an integer for the collectives of the engine, in the same order as the versions."""
        return self.number << 3 | self.job_ends << 2 | int(self.update)

    @classmethod
    def decode(cls, encoded: int) -> MembershipVersion:
        return cls(encoded >> 3, bool(encoded >> 2 & 1), HostUpdateResult(encoded & HostUpdateResult.mixed))


INITIAL_VERSION = MembershipVersion()


@dataclass(frozen=True)
class Member:
    """One worker's place in a world."""

    worker: WorkerId  # its process; another one in its place is another member
    slot: SlotId  # in which it runs
    host: HostId  # the executor that carries its slot
    rank: int  # its index in the world's `members`
    local_rank: int  # from 0, among the members on its machine, whichever executor they are in
    local_size: int  # how many members are on its machine
    cross_rank: int  # from 0, among the members with its local rank, one a machine
    cross_size: int  # how many machines have a member with its local rank
    position: Position | None  # of the state that it brought along; None for a newcomer


KEPT = "kept by "  # begins the name of a commit in a host's memory


@dataclass(frozen=True)
class Checkpoint:
    """A state that was written to the store, or a commit that a host keeps in memory: R23 (kept commits)."""

    fence: Fence  # of the world in which a member wrote it
    position: Position  # at which a run resumes from it
    name: str  # its folder, from `format_checkpoint_name`; in memory: KEPT, and who keeps it
    digest: str  # of its manifest; "": it has none

    @property
    def progress(self) -> tuple[Fence, Position]:
        """The newest of a run's has the highest."""
        return self.fence, self.position

    @property
    def is_kept(self) -> bool:
        """Whether it is in a host's memory."""
        return self.name.startswith(KEPT)


@dataclass(frozen=True)
class World:
    """The workers of one generation."""

    fence: Fence  # its own; the generation grows with each world
    members: tuple[Member, ...]  # in rank order: members[i].rank == i
    # The rank whose state the others take, a survivor at the highest position: R4 (survivors). None where no member
    # brings a position and no checkpoint is published: all begin from the same initial state.
    source: int | None
    reason: str  # a sentence: where it continues, and what ended the world before or who joins and leaves
    # At which it was formed. Members stop at a boundary once a step summary carries a higher one: R6 (step summary).
    version: MembershipVersion = INITIAL_VERSION
    # Where no member brings a position, the published checkpoints, newest first: the source loads the first that is
    # whole and broadcasts it.
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

    def view_of(self, worker: WorkerId) -> WorldView | None:
        """What a member is told; None: the worker is none."""
        me = self.member(worker)
        if me is None:
            return None
        return WorldView(
            fence=self.fence,
            size=self.size,
            me=me,
            host_ranks=self._by_host[me.host],
            source=self.source,
            position=self.position,
            receives=bool(self.resume) or me.position != self.position,
            has_receivers=bool(self.receivers),
            is_homogeneous=self._is_homogeneous,
            version=self.version,
            resume=self.resume,
        )

    @cached_property
    def _by_worker(self) -> dict[WorkerId, Member]:
        return {member.worker: member for member in self.members}

    @cached_property
    def _by_host(self) -> dict[HostId, tuple[int, ...]]:
        ranks: dict[HostId, list[int]] = {}
        for member in self.members:
            ranks.setdefault(member.host, []).append(member.rank)
        return {host: tuple(on_host) for host, on_host in ranks.items()}

    @cached_property
    def _is_homogeneous(self) -> bool:
        return len({member.local_size for member in self.members}) == 1


@dataclass(frozen=True)
class WorldView:
    """A world as one of its members knows it: as much in a world of ten thousand as in one of two."""

    fence: Fence  # as in `World`
    size: int  # how many members the world has
    me: Member  # the one that this is told
    host_ranks: tuple[int, ...]  # ranks of the members on its host, in order, its own among them
    source: int | None  # as in `World`
    position: Position | None  # as in `World`
    receives: bool = False  # it takes the source's state
    has_receivers: bool = False  # any member does; False: no broadcast at all
    is_homogeneous: bool = True  # all machines have as many members
    version: MembershipVersion = INITIAL_VERSION  # as in `World`
    resume: tuple[Checkpoint, ...] = ()  # as in `World`


class WorkerStatus(Enum):
    """Lifecycle of a living worker as the driver sees it."""

    STARTING = "starting"  # its process was announced
    WARM = "warm"  # imported, waits for its first world
    JOINING = "joining"  # named in a published world, not yet seen running in it
    RUNNING = "running"  # built the generation it is a member of
    READY = "ready"  # left its world at a known position and waits for the next
    SUCCESS = "success"  # has returned its result


@dataclass(frozen=True)
class Limits:
    """What bounds a job. Times are in seconds."""

    num_workers: int  # slots wanted at the start: R16 (start)
    min_workers: int  # fewest to continue with
    max_workers: int  # most ever
    gather_timeout: float = 10.0  # how long the start waits for `num_workers` once `min_workers` are there
    start_timeout: float = 600.0  # how long to wait for `min_workers`, at the start and after a loss
    lease: float = 5.0  # silence after which a worker is evicted
    reconnect_grace: float = 1.0  # how long a broken control connection alone may stay broken
    driver_timeout: float = 60.0  # a worker that the driver has not answered for so long has ended itself
    disconnect_window: float = 0.05  # connections that break within it count as broken together
    regroup_timeout: float = 600.0  # how long survivors wait for a member that runs but does not come
    debounce: float = 0.05  # how long a planned change waits for others to be announced with it
    failure_budget: int = 10  # failures within `failure_window` that are the workers' own, not of a lost host
    failure_window: float = 600.0  # for so long a failure or a kill counts
    reset_limit: int | None = None  # new worlds after the first, then no change is planned; None: unlimited
    max_global_batch: int | None = None  # the size of a world never exceeds it: R8 (weighting)
    cooldown_range: tuple[float, float] = (1.0, 60.0)  # of a slot or host: after one failure, and at most
    idle_slot_timeout: float = 60.0  # after so long a slot that no world needs gives its core back
    checkpoints_kept: int = 3  # how many are published at a time
    max_runtime: float | None = None  # after so long the job ends at its next step boundary; None: unlimited
    all_results: bool = False  # R15 (end): a success needs every member's result; False: rank 0's

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


MAX_HEARTBEAT_INTERVAL = 0.25  # seconds, in a small job with an ordinary lease
HEARTBEATS_PER_LEASE = 5  # in a small job
# In any job. One may be lost, and half a lease without any shows that the driver is cut off: R12 (driver silence).
MIN_HEARTBEATS_PER_LEASE = 2.5
HEARTBEATS_PER_SECOND = 250  # of all slots together, about a quarter of what one core serves


def heartbeat_interval(lease: float, slots: int) -> float:
    """Seconds between two heartbeats of each of so many slots: it grows with them, and the lease bounds it."""
    small_job = min(MAX_HEARTBEAT_INTERVAL, lease / HEARTBEATS_PER_LEASE)
    return max(small_job, min(slots / HEARTBEATS_PER_SECOND, lease / MIN_HEARTBEATS_PER_LEASE))


def format_position(position: Position | None) -> str:
    """For people, who count epochs from 1."""
    if position is None:
        return "the beginning"
    return f"epoch {position.epoch + 1}, {position.phase.name.lower()}, step {position.step}"


_SETTINGS = ElasticConfig()


class SlotOutcome(NamedTuple):
    """How a slot ended, as `LaunchEnded` has it."""

    reason: str  # in words, for people
    cancelled: bool = False  # by the user or by Spark: the driver does not launch the slot again
    executor_lost: bool = False  # it did not end by itself: the cluster reports that the executor is lost


@dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """What the driver knows of a slot when it launches it; the same for all slots of a job. A field with the name of an
    `ElasticConfig` setting takes its value: a new slot setting is one more line here."""

    address: str  # host:port of the driver's rendezvous server
    key: bytes = field(repr=False)  # the job's secret, which never is in a command line or an environment
    attempt: int  # number of the driver that holds the run: the first half of every fence
    job_name: str = ""  # the job's name, for logs and Spark's UI
    certificate: str | None = None  # PEM, of the driver's server. None: neither that nor workers encrypt
    preload: tuple[str, ...] = ()  # modules that a process must be able to import before it is warm
    imports: tuple[str, ...] = field(default=(), repr=False)  # early ones, and variables, which may be secret
    commit_key: bytes | None = field(default=None, repr=False)  # R23 (kept commits): the run's; None: none

    # Settings, which `ElasticConfig` explains.
    orphan_timeout: float = _SETTINGS.orphan_timeout
    collective_timeout: float = _SETTINGS.collective_timeout
    driver_timeout: float = _SETTINGS.driver_timeout
    spare_after: float = _SETTINGS.spare_after
    fork_workers: bool = _SETTINGS.fork_workers
    worker_port_range: tuple[int, int] | None = _SETTINGS.worker_port_range
    network_interface: str | None = _SETTINGS.network_interface
    cpus_per_worker: int | None = _SETTINGS.cpus_per_worker
    device: str = _SETTINGS.device
    slots_per_gpu: int = _SETTINGS.slots_per_gpu

    @classmethod
    def from_config(cls, config: ElasticConfig, **known: Any) -> Self:
        """With the settings of a job's configuration, and `known` for the other fields."""
        settings = {f.name for f in fields(cls)} & {f.name for f in fields(config)}
        return cls(**{name: getattr(config, name) for name in settings}, **known)


@dataclass(frozen=True, kw_only=True)
class SlotIdentity:
    """Which slot a process belongs to."""

    slot: SlotId  # its id, which names the attempt of the task
    host: HostId = ""  # the host that carries the slot: a Spark executor
    host_pid: int = 0  # the process whose end is the host's end: a Spark executor's JVM; 0: none is known
    address: str = "127.0.0.1"  # the address of this machine at which peers reach the worker
    resources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # Spark's, such as {"gpu": ("0",)}
    files: str = ""  # the folder of `SparkContext.addFile`'s files on the slot's host; "": there is none
    device_problem: str = ""  # why it has no GPU although the job asks for one: the driver refuses it


@dataclass(frozen=True, kw_only=True)
class WorkerIdentity(SlotIdentity):
    """Which worker of its slot a training process is, once its slot has made it one."""

    worker: WorkerId  # its number grows from worker to worker of the slot
    ports: tuple[int, int] | None = None  # first and last port at which the worker may listen; None: any
    left: Fence | None = None  # the world that another process left as this worker, which begins again
    position: Position | None = None  # where that process stood

    @classmethod
    def of_slot(cls, slot: SlotIdentity, **own: Any) -> Self:
        return cls(**{f.name: getattr(slot, f.name) for f in fields(slot)}, **own)


K = TypeVar("K")
V = TypeVar("V")

MIN_OVERLAY = 8


class Table(Mapping[K, V], Generic[K, V]):
    """An immutable mapping for the machines' states: `put` and `drop` return a changed copy, which costs about the
    square root of the size, as they go to a small overlay that is merged into the base once it has grown. Iteration
    order is that of a dict: the same in every run."""

    __slots__ = ("_base", "_overlay", "_size")

    def __init__(self) -> None:
        self._base: dict[K, V] = {}
        self._overlay: dict[K, tuple[V] | None] = {}  # None: dropped
        self._size = 0

    def put(self, key: K, value: V) -> Table[K, V]:
        return self._copy_with(key, (value,), self._size + (key not in self))

    def drop(self, key: K) -> Table[K, V]:
        """Without `key`; the same table if it has no such key."""
        return self._copy_with(key, None, self._size - 1) if key in self else self

    def _copy_with(self, key: K, entry: tuple[V] | None, size: int) -> Table[K, V]:
        new: Table[K, V] = Table.__new__(Table)
        overlay = dict(self._overlay)
        overlay[key] = entry
        new._size = size
        if len(overlay) <= max(MIN_OVERLAY, isqrt(size)):
            new._base, new._overlay = self._base, overlay
        else:
            new._base, new._overlay = _merge(self._base, overlay), {}
        return new

    def __getitem__(self, key: K) -> V:
        if key in self._overlay:
            entry = self._overlay[key]
            if entry is None:
                raise KeyError(key)
            return entry[0]
        return self._base[key]

    def __contains__(self, key: object) -> bool:
        if key in self._overlay:
            return self._overlay[key] is not None
        return key in self._base

    def __len__(self) -> int:
        return self._size

    # Copying all into a dict is ten times quicker than going through keys and `__getitem__`.

    def __iter__(self) -> Iterator[K]:
        return iter(self._to_dict())

    def values(self) -> ValuesView[V]:
        return self._to_dict().values()

    def items(self) -> ItemsView[K, V]:
        return self._to_dict().items()

    def _to_dict(self) -> dict[K, V]:
        return _merge(self._base, self._overlay) if self._overlay else self._base


def _merge(base: Mapping[K, V], overlay: Mapping[K, tuple[V] | None]) -> dict[K, V]:
    merged = dict(base)
    for key, entry in overlay.items():
        if entry is None:
            merged.pop(key, None)
        else:
            merged[key] = entry[0]
    return merged
