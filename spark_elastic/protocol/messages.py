"""What slots and workers say to the driver, and what it answers. Pure values.

The rendezvous client sends a message as it stands, the server stamps the time of receipt (`events.Received`), and the
driver machine consumes it. A new field therefore concerns its sender, this file and the machine only. Messages that
the server answers without the machine, as its long polls, are in `rendezvous.messages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from spark_elastic.protocol.types import Checkpoint, Fence, HostId, Position, SlotId, WorkerId, World

# Words of the driver's answer to a request of another release; the slot's last words then have them.
ANOTHER_RELEASE = "install one release"

R_co = TypeVar("R_co", covariant=True)


class Request(Generic[R_co]):
    """A message to the driver; `R_co` is the class of its reply."""


@dataclass(frozen=True)
class SlotRequest(Request[R_co]):
    """A message from a slot."""

    slot: SlotId  # the sender


@dataclass(frozen=True)
class WorkerRequest(Request[R_co]):
    """A message from a worker."""

    worker: WorkerId  # the sender

    @property
    def slot(self) -> SlotId:
        return self.worker.slot


# ---- replies


@dataclass(frozen=True)
class Acknowledged:
    """The driver has received the message."""

    # Why the sender must end; None: it continues.
    stop: str | None = None


@dataclass(frozen=True)
class Admission:
    """Whether a slot may carry a worker. A refused slot stays until the driver releases it: R14 (duplicates)."""

    # False: the job is over, or the host is unfit.
    accepted: bool
    # The sentence that refuses it; "" when accepted.
    reason: str = ""
    # Seconds until the next heartbeat is due.
    heartbeat_interval: float = 1.0


@dataclass(frozen=True)
class HeartbeatReply:
    """Answers a heartbeat."""

    # Seconds until the next heartbeat is due.
    heartbeat_interval: float = 1.0
    # Why the slot must end; None: it continues.
    stop: str | None = None


@dataclass(frozen=True)
class NextWorld:
    """Answers a worker that waits for a world. Both fields None: not decided yet, ask again."""

    # In which the worker is a member.
    world: World | None = None
    # Why the worker must end.
    stop: str | None = None

    @property
    def is_undecided(self) -> bool:
        return self.world is None and self.stop is None


# ---- from slots


@dataclass(frozen=True)
class RegisterSlot(SlotRequest[Admission]):
    """A slot task has started on a host."""

    # The executor's id; where there is no Spark, the machine's name.
    host: HostId
    # Number of the launch that carries it. One launch may have several attempts alive: R14 (duplicates).
    launch: int
    # Name of its machine, by which discovery may list it.
    node: str = ""
    # Why the slot cannot take part, "" if it can: it has no device for its worker, or, as the server finds in `facts`,
    # the host's software does not fit.
    unfit: str = ""
    # What the host runs: versions, pids, boot id; JSON values by name.
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Heartbeat(SlotRequest[HeartbeatReply]):
    """The slot is alive, and this is the state of its worker."""

    # None while it has none.
    worker: WorkerId | None = None
    # State letter of the worker's process as in /proc, "" without a process.
    state: str = ""
    # The worker's main thread waits for other workers; False: it works.
    waits: bool = False
    # For how long it has waited or worked, in seconds.
    seconds: float = 0.0
    # Where the main thread is; "" unless it has worked for long or is stopped.
    stack: str = ""


@dataclass(frozen=True)
class WorkerStarted(SlotRequest[Acknowledged]):
    """The slot announces the process that is its worker now."""

    # Its number in the slot is higher than those of all workers that the slot had before.
    worker: WorkerId


@dataclass(frozen=True)
class WorkerExited(SlotRequest[Acknowledged]):
    """The slot saw the process of its worker end."""

    # Whose process it was.
    worker: WorkerId
    # As subprocess gives it; negative: the signal that killed it.
    exit_code: int
    # The exit in words, for people.
    reason: str = ""
    # The kernel killed it because memory ran out.
    out_of_memory: bool = False
    # Python frames in which native code crashed; "" if it did not crash or the frames are unknown.
    crashed_at: str = ""


# ---- from workers


@dataclass(frozen=True)
class RequestNextWorld(WorkerRequest[NextWorld]):
    """The worker has left its world, if it had one, and asks for the next (long poll), again and again until it gets
    one."""

    # The world it left; None before its first.
    fence: Fence | None = None
    # Where its state stands; None for a newcomer, which holds no state.
    position: Position | None = None
    # Members that it blames for its broken group; empty for a planned change.
    suspects: tuple[WorkerId, ...] = ()
    # Why it asks; the driver shows it if its world broke.
    reason: str = ""
    # It stopped at a step boundary because a change was announced.
    planned: bool = False


@dataclass(frozen=True)
class WorldFormed(WorkerRequest[Acknowledged]):
    """The worker has built the group of that generation."""

    # Of that generation.
    fence: Fence


@dataclass(frozen=True)
class WorkerFailed(WorkerRequest[Acknowledged]):
    """User code raised an exception: R13 (deterministic failures). Sent before the worker closes its group."""

    # Of the world that it entered last; None before its first, or if it could not load the program.
    fence: Fence | None
    # Of the state that it held; None: it held none.
    position: Position | None
    # Equal for exceptions that count as the same failure.
    fingerprint: str
    # Cut to what a message can carry.
    traceback: str


@dataclass(frozen=True)
class WorkerDone(WorkerRequest[NextWorld]):
    """The worker reached the end of training, R15 (end), and keeps its state until the reply (long poll): either
    a stop, or another world."""

    # Of the world in which it did.
    fence: Fence
    # Of the state that it keeps.
    position: Position
    # JSON text.
    result: str


@dataclass(frozen=True)
class CheckpointWritten(WorkerRequest[Acknowledged]):
    """The worker has written a checkpoint. The driver publishes it: R18 (publication)."""

    # Complete in the store.
    checkpoint: Checkpoint


@dataclass(frozen=True)
class CheckpointStoreFull(WorkerRequest[Acknowledged]):
    """The store of the checkpoints has no room for the worker's new one: the driver removes the oldest one."""

    # How many checkpoints of the worker's process have found no room, with this one: a message that is sent again,
    # since its answer was lost, is about the same one.
    number: int


@dataclass(frozen=True)
class WorkerStraggles(WorkerRequest[Acknowledged]):
    """The worker keeps the others of its world waiting, and they would be quicker without it."""

    # Of that world; ignored once there is a newer one.
    fence: Fence
    # Why it drains, as people read it.
    reason: str


DriverMessage: TypeAlias = (
    RegisterSlot
    | Heartbeat
    | WorkerStarted
    | WorkerExited
    | RequestNextWorld
    | WorldFormed
    | WorkerFailed
    | WorkerDone
    | CheckpointWritten
    | CheckpointStoreFull
    | WorkerStraggles
)
