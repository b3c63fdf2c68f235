"""The driver machine's records of slot jobs, slots and workers, alive or gone. Values only."""

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
