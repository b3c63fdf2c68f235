"""What a machine wants to be done, as values. Each command has a reason; together the reasons tell the job's story."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from spark_elastic.protocol.types import Checkpoint, Fence, Position, SlotId, WorkerId, World


@dataclass(frozen=True)
class Command:
    reason: str


# ---- of the driver machine


@dataclass(frozen=True)
class LaunchSlot(Command):
    """Start one single-task Spark job that carries a slot; `job` is its number, never used twice."""

    launch: int


@dataclass(frozen=True)
class Publish(Command):
    """A new world: answer the joins (and results) of its members with it and open its address exchange.

    A member whose question carries an older fence gets it too, however late: an answer may have been lost, and the
    driver machine takes no notice of a question that this world answers.
    """

    world: World


@dataclass(frozen=True)
class Abort(Command):
    """That generation is over: tell every member, close its address exchange."""

    fence: Fence


@dataclass(frozen=True)
class Announce(Command):
    """A planned change is wanted: workers carry `version` into their trailers and stop at a common boundary."""

    version: int


@dataclass(frozen=True)
class StopWorker(Command):
    """The worker shall end (exit code 0). `kill`: its slot kills it without asking. A slot that stays starts its
    spare in its place unless it is released too."""

    worker: WorkerId
    kill: bool = False


@dataclass(frozen=True)
class ReleaseSlot(Command):
    """The slot task shall end its worker and return."""

    slot: SlotId


@dataclass(frozen=True)
class PublishCheckpoint(Command):
    """From now on `kept` (newest first) are what a run resumes from; others may be deleted."""

    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True)
class NotifyUser(Command):
    """Nothing is done; tell the user why."""


class Outcome(Enum):
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
    """The job is over. results: by rank (JSON text), for SUCCESS. detail: the traceback, for USER_ERROR."""

    outcome: Outcome
    results: tuple[str, ...] = ()
    detail: str = ""


DriverCommand: TypeAlias = (
    LaunchSlot | Publish | Abort | Announce | StopWorker | ReleaseSlot | PublishCheckpoint | NotifyUser | End
)


# ---- of the worker machine


@dataclass(frozen=True)
class Join(Command):
    """Ask the driver for the next world; repeat until answered."""

    fence: Fence | None
    position: Position | None
    suspects: tuple[WorkerId, ...] = ()
    planned: bool = False


@dataclass(frozen=True)
class Form(Command):
    """Build the group of this world."""

    world: World


@dataclass(frozen=True)
class Sync(Command):
    """Take part in handing the source's state to `receivers` (ranks), into staging."""

    world: World


@dataclass(frozen=True)
class Run(Command):
    """Train on from `position` (None: from the beginning)."""

    world: World
    position: Position | None


@dataclass(frozen=True)
class AbortGroup(Command):
    """Free every waiter of the group of `fence`, at once."""

    fence: Fence


@dataclass(frozen=True)
class CloseGroup(Command):
    fence: Fence


@dataclass(frozen=True)
class ReportFailure(Command):
    fence: Fence | None
    position: Position | None
    fingerprint: str
    traceback: str


@dataclass(frozen=True)
class ReportDone(Command):
    """Report the result and wait: for the acknowledgement (stop) or another world."""

    fence: Fence
    position: Position
    result: str


@dataclass(frozen=True)
class Exit(Command):
    """End the process."""

    code: int


WorkerCommand: TypeAlias = (
    Join | Form | Sync | Run | AbortGroup | CloseGroup | ReportFailure | ReportDone | Exit
)
