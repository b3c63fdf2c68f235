"""What can happen, as values. Each event has `now`: monotonic seconds of the process that posts it.

Driver events are posted by the rendezvous server, the launcher, discovery and the ticker; worker events by the
worker's loop and its control thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from spark_elastic.protocol.messages import DriverMessage, Heartbeat
from spark_elastic.protocol.types import Fence, HostId, Position, SlotId, WorkerId, World


@dataclass(frozen=True)
class Event:
    now: float


# ---- at the driver


@dataclass(frozen=True)
class Tick(Event):
    """Time passed; deadlines and leases are looked at."""


@dataclass(frozen=True)
class Received(Event):
    """The server received a message from a slot or a worker."""

    message: DriverMessage


@dataclass(frozen=True)
class LaunchEnded(Event):
    """The Spark job of a slot is over. `cancelled`: by the user or Spark, hence never launched again. host_lost: its
    task did not end by itself, Spark says that the executor is lost."""

    launch: int
    reason: str
    cancelled: bool = False
    executor_lost: bool = False


@dataclass(frozen=True)
class HostAppeared(Event):
    """Spark lists another executor."""

    host: HostId


@dataclass(frozen=True)
class HostLost(Event):
    """Spark no longer lists the executor."""

    host: HostId
    reason: str


@dataclass(frozen=True)
class HostsDiscovered(Event):
    """Discovery's newest answer: which hosts may take part, each with how many slots. None: all, without limit.
    A host is named by its id or by its machine's name."""

    hosts: tuple[tuple[str, int], ...] | None


@dataclass(frozen=True)
class ConnectionLost(Event):
    """The control connection of a worker (`worker` set) or of a slot task broke while a request was open on it.

    failed: it was reset or timed out, as the network does it; that of a process that dies is closed by its kernel."""

    slot: SlotId
    worker: WorkerId | None = None
    reset: bool = False


@dataclass(frozen=True)
class ConnectionBack(Event):
    """The connection stands again."""

    slot: SlotId
    worker: WorkerId | None = None


@dataclass(frozen=True)
class WorkerStalled(Event):
    """A member has kept others of its world waiting; `text` says for how long, and what it was doing."""

    worker: WorkerId
    fence: Fence
    text: str


@dataclass(frozen=True)
class DrainRequested(Event):
    """A worker or all workers of a host shall leave at a step boundary. Exactly one of the three is set.

    host: its id or its machine's name. rank: of the newest world. The slot of a single worker is not asked for
    again before a member is lost; what a host had to give is looked for elsewhere. by_hand: somebody asked for it, and
    is told where it meets nobody.
    """

    reason: str
    worker: WorkerId | None = None
    host: HostId | None = None
    rank: int | None = None
    by_user: bool = False


@dataclass(frozen=True)
class SlotsWanted(Event):
    """R17: another job of the application needs slots, or trains on them. Whoever has too few gives back for a while
    what it cannot use; those that it lacks are in use, so no time is counted.

    taken: nothing is to be given back.
    """

    reason: str
    in_use: bool = False


@dataclass(frozen=True)
class CancelRequested(Event):
    """The user or Spark ends the job."""

    reason: str


DriverEvent: TypeAlias = (
    Tick
    | Received
    | LaunchEnded
    | HostAppeared
    | HostLost
    | HostsDiscovered
    | ConnectionLost
    | ConnectionBack
    | WorkerStalled
    | DrainRequested
    | SlotsWanted
    | CancelRequested
)


def is_heartbeat(event: DriverEvent) -> bool:
    """Whether the event is only a sign of life. Most events are."""
    return isinstance(event, Received) and isinstance(event.message, Heartbeat)


# ---- at a worker


@dataclass(frozen=True)
class Warm(Event):
    """Everything is imported and the function is loaded."""


@dataclass(frozen=True)
class WorldReceived(Event):
    world: World


@dataclass(frozen=True)
class GroupFormed(Event):
    """The group of that generation stands."""

    fence: Fence


@dataclass(frozen=True)
class Synced(Event):
    """R5: received state was verified and swapped in together with its position.

    position: None for a program that hands its state on while it runs: what it had stays until `Applied` tells more.
    """

    fence: Fence
    position: Position | None


@dataclass(frozen=True)
class Applied(Event):
    """A step was applied; `position` is the next one."""

    fence: Fence
    position: Position


@dataclass(frozen=True)
class Boundary(Event):
    """R6: the trailer asked all ranks to stop here; the step before `position` is applied everywhere."""

    fence: Fence
    reason: str


@dataclass(frozen=True)
class GroupBroken(Event):
    """Forming, sync or exchange failed. suspects: ranks at fault in that world, may be empty."""

    fence: Fence
    suspects: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class AbortReceived(Event):
    """The driver says that a generation is over."""

    fence: Fence
    reason: str


@dataclass(frozen=True)
class UserRaised(Event):
    fingerprint: str
    traceback: str


@dataclass(frozen=True)
class Finished(Event):
    """The end of training was reached; `result` is opaque JSON text."""

    fence: Fence
    result: str


@dataclass(frozen=True)
class StopReceived(Event):
    """The driver has no more use for this worker: it was acknowledged, released, or is not of this job's worlds."""

    reason: str


@dataclass(frozen=True)
class DriverSilent(Event):
    """R12: the driver did not answer for `seconds`."""

    seconds: float


WorkerEvent: TypeAlias = (
    Warm
    | WorldReceived
    | GroupFormed
    | Synced
    | Applied
    | Boundary
    | GroupBroken
    | AbortReceived
    | UserRaised
    | Finished
    | StopReceived
    | DriverSilent
)
