"""The commands of the two machines, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from spark_elastic.protocol.messages import RequestNextWorld, WorkerDone, WorkerRaised
from spark_elastic.protocol.types import (
    Checkpoint,
    Fence,
    MembershipVersion,
    Position,
    SlotId,
    WorkerId,
    World,
    WorldView,
)


@dataclass(frozen=True)
class Command:
    reason: str  # why, in a sentence: the reasons are the job's event log


# ---- of the driver machine


@dataclass(frozen=True)
class LaunchSlot(Command):
    """Start one single-task Spark job that carries a slot."""

    launch: int  # its number, never used twice


@dataclass(frozen=True)
class PublishWorld(Command):
    """A new world: answer the requests (and results) of its members with it and open its address exchange. A member
    that asks with an older fence gets it, too, however late: an answer may have been lost."""

    world: World  # of the generation after the last published one


@dataclass(frozen=True)
class AbortWorld(Command):
    """That generation is over: tell every member, close its address exchange."""

    fence: Fence  # of the newest world


@dataclass(frozen=True)
class AnnounceChange(Command):
    """A planned change is wanted: workers put `version` into their step summaries and stop at a common boundary."""

    version: MembershipVersion  # higher than the world's


@dataclass(frozen=True)
class StopWorker(Command):
    """Tell the worker to end (exit code 0). Its slot starts the spare in its place, unless it is released, too."""

    worker: WorkerId  # often one that has departed, or was never of the job, but asks
    kill: bool = False  # its slot kills it without asking


@dataclass(frozen=True)
class ReleaseSlot(Command):
    """Tell the slot task to end its worker and return."""

    slot: SlotId  # may be one that the driver refused


@dataclass(frozen=True)
class PublishCheckpoint(Command):
    """Publish these checkpoints: a run resumes from one of them, and others may be deleted."""

    checkpoints: tuple[Checkpoint, ...]  # newest first


@dataclass(frozen=True)
class NotifyUser(Command):
    """Nothing changes; tell the user why."""


class JobOutcome(Enum):
    SUCCESS = "success"
    USER_ERROR = "user error"
    NOT_ENOUGH_WORKERS = "not enough workers"
    FAILURE_BUDGET = "failure budget exceeded"
    RESET_LIMIT = "reset limit exceeded"
    OUT_OF_MEMORY = "out of memory"
    TIME_LIMIT = "time limit"
    CANCELLED = "cancelled"
    DEFECT = "defect of the driver"


@dataclass(frozen=True)
class End(Command):
    """The job is over."""

    outcome: JobOutcome  # decides which error the caller gets
    results: tuple[str, ...] = ()  # by rank (JSON text), for SUCCESS
    detail: str = ""  # the traceback, for USER_ERROR


WorldCommand: TypeAlias = PublishWorld | AbortWorld | AnnounceChange
SlotCommand: TypeAlias = LaunchSlot | ReleaseSlot | StopWorker
DriverCommand: TypeAlias = SlotCommand | WorldCommand | PublishCheckpoint | NotifyUser | End


# ---- of the worker machine


@dataclass(frozen=True)
class Ask(Command):
    """Send it to the driver, again and again until a world or a stop answers it."""

    message: RequestNextWorld | WorkerDone  # without the worker's address


@dataclass(frozen=True)
class Report(Command):
    """Send it to the driver."""

    message: WorkerRaised  # its traceback is printed, too


@dataclass(frozen=True)
class Form(Command):
    """Build the group of this world."""

    world: WorldView  # in which the worker is a member


@dataclass(frozen=True)
class Sync(Command):
    """Take part in the broadcast of the source's state to the members behind it, into staging."""

    world: WorldView  # whose group is formed


@dataclass(frozen=True)
class Run(Command):
    """Train on."""

    world: WorldView  # whose group is formed and whose state, if it has one, is in place
    position: Position | None  # None: from the beginning


@dataclass(frozen=True)
class AbortGroup(Command):
    """Wake every thread that waits in the group of `fence`, at once."""

    fence: Fence  # ignored unless it is of the world that the worker is in


@dataclass(frozen=True)
class CloseGroup(Command):
    fence: Fence  # of the world that it leaves


@dataclass(frozen=True)
class Exit(Command):
    """End the process."""

    code: int  # 0: it is not needed; 1: user code raised; or DRIVER_SILENT_EXIT_CODE


WorkerCommand: TypeAlias = Ask | Report | Form | Sync | Run | AbortGroup | CloseGroup | Exit
