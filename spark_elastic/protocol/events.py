"""What can happen, as values. Driver events are posted by the rendezvous server, the launcher, discovery and the
ticker; worker events by the worker's loop and its thread that polls the driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from spark_elastic.protocol.messages import DriverMessage, Heartbeat
from spark_elastic.protocol.types import Fence, HostId, Position, SlotId, WorkerId, WorldView


@dataclass(frozen=True)
class Event:
    now: float  # monotonic seconds of the process that posts it
    id: str = field(default="", kw_only=True)  # the driver loop's name for it, such as e1734, to be cited


# ---- at the driver


@dataclass(frozen=True)
class Tick(Event):
    """Time passed: deadlines and leases are checked."""


@dataclass(frozen=True)
class Received(Event):
    """The server received a message from a slot or a worker."""

    message: DriverMessage  # as it was sent; `now` is when it came


@dataclass(frozen=True)
class LaunchEnded(Event):
    """A slot launch, that is the Spark job that carries a slot, is over."""

    launch: int  # its number, as in `LaunchSlot`
    reason: str  # how it ended, as Spark or the launcher says it; part of what the user reads
    cancelled: bool = False  # by the user or Spark, so the job ends
    executor_lost: bool = False  # its task did not end by itself: Spark says that the executor is lost


@dataclass(frozen=True)
class HostAppeared(Event):
    """Spark lists another executor."""

    host: HostId  # the executor's id


@dataclass(frozen=True)
class HostLost(Event):
    """Spark no longer lists the executor."""

    host: HostId  # the executor's id
    reason: str  # a sentence for the log, as for all slots and workers of the host


@dataclass(frozen=True)
class HostsDiscovered(Event):
    """Discovery's newest answer: which hosts may take part. Level-triggered: it never says what changed."""

    hosts: tuple[tuple[str, int], ...] | None  # by id or machine's name, and slots; None: all, without limit


@dataclass(frozen=True)
class ConnectionLost(Event):
    """A control connection broke while a request was open on it."""

    slot: SlotId  # that holds the connection, or whose worker does
    worker: WorkerId | None = None  # None: it is the slot task's connection
    reset: bool = False  # reset by the network, or timed out; False: a kernel closed it, as of a dead process


@dataclass(frozen=True)
class ConnectionBack(Event):
    """The worker or slot has connected again."""

    slot: SlotId  # as in `ConnectionLost`
    worker: WorkerId | None = None  # as in `ConnectionLost`


@dataclass(frozen=True)
class WorkerStalled(Event):
    """A member has kept others of its world waiting. That only explains the end of this world, if it ends."""

    worker: WorkerId  # the one that the others wait for
    fence: Fence  # of the world in which it did; ignored once that is not the newest
    text: str  # for how long, and what it was doing


@dataclass(frozen=True)
class DrainRequested(Event):
    """A request that a worker, or all workers of a host, leave at a step boundary; one of worker, host and rank is set.

    The slot of a single worker is not asked for again before a member is lost, those of a host are, on other hosts."""

    reason: str  # why they have to leave, for messages
    worker: WorkerId | None = None  # leaves alone
    host: HostId | None = None  # its id or its machine's name
    rank: int | None = None  # of the newest world
    by_user: bool = False  # a user requested it, and reads if it concerns no worker, or has to wait


@dataclass(frozen=True)
class SlotsWanted(Event):
    """R17 (gathering): another job of the application needs slots, or trains on them. A job with too few slots gives
    them back for a while, and its `start_timeout` begins again."""

    reason: str  # what the user reads about slots that are given back
    in_use: bool = False  # the other job trains, so this job keeps its slots


@dataclass(frozen=True)
class CancelRequested(Event):
    """The user or Spark ends the job."""

    reason: str  # a sentence; the job's error shows it


ClusterEvent: TypeAlias = LaunchEnded | HostAppeared | HostLost | HostsDiscovered | SlotsWanted
ConnectionEvent: TypeAlias = ConnectionLost | ConnectionBack
UserEvent: TypeAlias = DrainRequested | CancelRequested
DriverEvent: TypeAlias = Tick | Received | ClusterEvent | ConnectionEvent | WorkerStalled | UserEvent


def is_heartbeat(event: DriverEvent) -> bool:
    """Whether the event is only a sign of life. Most events are."""
    return isinstance(event, Received) and isinstance(event.message, Heartbeat)


# ---- at a worker


@dataclass(frozen=True)
class Warm(Event):
    """Everything is imported and the user's function is loaded."""


@dataclass(frozen=True)
class WorldReceived(Event):
    world: WorldView  # the answer to the newest request; it may be one that the worker has left


@dataclass(frozen=True)
class GroupFormed(Event):
    """The group of that generation stands."""

    fence: Fence  # of that world


@dataclass(frozen=True)
class Synced(Event):
    """R5 (staging): received state was verified and swapped in together with its position."""

    fence: Fence  # of the world whose source sent the state
    position: Position | None  # None: the program broadcasts its state as it runs, and keeps its old position


@dataclass(frozen=True)
class Applied(Event):
    """A step was applied."""

    fence: Fence  # of the world that took the step
    position: Position  # the next step


@dataclass(frozen=True)
class Boundary(Event):
    """R6 (step summary): all ranks stop here; the step before is applied on each."""

    fence: Fence  # of the world that stops
    reason: str  # why, in words, for the next request


@dataclass(frozen=True)
class GroupBroken(Event):
    """Forming, the broadcast of the state, or a collective failed."""

    fence: Fence  # of the group's world
    suspects: tuple[int, ...]  # ranks at fault in that world; may be empty
    reason: str  # the text of the error


@dataclass(frozen=True)
class AbortReceived(Event):
    """The driver says that a generation is over."""

    fence: Fence  # of the newest generation that is over; older ones are over as well
    reason: str  # why, for the error of every collective that waits


@dataclass(frozen=True)
class UserRaised(Event):
    fingerprint: str  # equal for exceptions that count as the same failure
    traceback: str  # from `format_traceback`: cut to what a message can carry


@dataclass(frozen=True)
class Finished(Event):
    """The end of training was reached."""

    fence: Fence  # of the world in which it was
    result: str  # JSON text, opaque here


@dataclass(frozen=True)
class StopReceived(Event):
    """The driver needs this worker no more: it was acknowledged, released, or left out of the world."""

    reason: str  # as the driver said it


@dataclass(frozen=True)
class DriverSilent(Event):
    """R12 (driver silence): the driver has not answered for too long."""

    seconds: float  # since its newest answer


WorldEvent: TypeAlias = GroupFormed | Synced | Applied | Boundary | GroupBroken | Finished  # of one world
AnswerEvent: TypeAlias = WorldReceived | AbortReceived | StopReceived | DriverSilent
WorkerEvent: TypeAlias = Warm | AnswerEvent | UserRaised | WorldEvent
