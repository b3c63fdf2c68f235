"""Who there is: the driver's records of slot jobs, slots and workers. Values only; `driver_machine` changes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spark_elastic.protocol.types import HostId, Position, SlotId, WorkerId, WorkerStatus


class Leave(Enum):
    """Why a worker drains."""

    HOST = "its host goes"
    UNLISTED = "its host is not listed"  # undone once it is listed again
    BY_HAND = "it was asked to"  # its slot is not asked for again before a member is lost


@dataclass(frozen=True)
class JobRecord:
    """A slot job that is alive. fruitless: how many of its predecessors in a row ended without a warm worker.
    slots: how many of its attempts are alive. warmed: one of them brought a warm worker. withheld: once it has ended,
    no other follows it before a member is lost."""

    job: int
    fruitless: int = 0
    slots: int = 0
    warmed: bool = False
    host_lost: bool = False
    withheld: bool = False


@dataclass(frozen=True)
class PutOff:
    """A slot job that is launched later. reason: why it is launched at all."""

    until: float
    reason: str


@dataclass(frozen=True)
class SlotRecord:
    """A slot task that is alive. extra: the job had another one alive when it came (R14). heard: its last beat.
    cut: since when its control connection is broken. node: its machine's name. unfit: why what its host runs cannot
    take part, "" if it can."""

    slot: SlotId
    job: int
    host: HostId
    heard: float
    extra: bool = False
    worker: WorkerId | None = None
    cut: float | None = None
    node: str = ""
    unfit: str = ""


@dataclass(frozen=True)
class WorkerRecord:
    """A living worker.

    heard: when it was last known to run. arrival: order in which newcomers came, 0 while it has not. rank: in the
    last published world, None for who is not in it. formed: built that world. came: left it, by a join or a
    result, at `position`. draining: why it shall leave, "" if not; leave: of which kind that is. arrived: when it
    came as a newcomer.
    """

    worker: WorkerId
    slot: SlotId
    host: HostId
    heard: float
    status: WorkerStatus = WorkerStatus.STARTING
    arrival: int = 0
    rank: int | None = None
    formed: bool = False
    came: bool = False
    position: Position | None = None
    draining: str = ""
    leave: Leave | None = None
    arrived: float = 0.0
    extra: bool = False


class SlotEnd(Enum):
    """How a slot task is known to be gone."""

    SEEN = "it ended"  # and whatever ran in it
    TOLD = "it was told to end, or will be once it speaks"
    DISOWNED = "its executor is lost"  # as Spark says, which may have lost sight of it only


@dataclass(frozen=True)
class Unsure:
    """A member that was given up and may be alive (R18). until: when it has ended itself, for want of the driver.
    heard: when it or its slot last spoke. hung_up: its connection or its slot's ended while it still spoke, as that of
    a process does that dies, not that of a host that is cut off. disowned: Spark says that its executor is lost."""

    until: float
    heard: float
    hung_up: bool = False
    disowned: bool = False


@dataclass(frozen=True)
class Gone:
    """A worker that ended or was given up. liable: should its slot report a failed exit later, that is a failure of
    its own and not yet counted. took_part: it had been in a world."""

    reason: str
    status: WorkerStatus
    liable: bool = False
    took_part: bool = False
