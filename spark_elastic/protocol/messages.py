"""What slots and workers say to the driver, and what it answers. Pure values.

The rendezvous client sends a message as it stands, the server stamps the time of receipt (`events.Received`), and the
driver machine consumes it: a new field concerns its sender, this file and the machine only. Messages that the server
answers without the machine, as its long polls, are in `rendezvous.messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from spark_elastic.protocol.types import Checkpoint, Fence, HostId, Position, SlotId, WorkerId, WorldView

# Words of the driver's answer to a request of another release; the slot's last words then have them.
ANOTHER_RELEASE = "install one release"

JOB_OVER = "the job is over"  # begins what the slots that take part are told at the end of a job
# Words of the reason for which a job ends whose run another driver holds now, or whose Spark is gone.
TAKEN_OVER, SPARK_STOPPED = "was taken over by another driver", "the SparkContext was stopped"

R_co = TypeVar("R_co", covariant=True)


class DriverRequest(Generic[R_co]):
    """A message to the driver; `R_co` is the class of its reply."""


@dataclass(frozen=True)
class SlotRequest(DriverRequest[R_co]):
    """A message from a slot."""

    slot: SlotId  # the sender


@dataclass(frozen=True)
class WorkerRequest(DriverRequest[R_co]):
    """A message from a worker."""

    worker: WorkerId  # the sender

    @property
    def slot(self) -> SlotId:
        return self.worker.slot


@dataclass(frozen=True)
class Acknowledged:
    """The driver has received the message."""


@dataclass(frozen=True)
class Admission:
    """Whether a slot may carry a worker. A refused slot stays until the driver releases it: R14 (duplicates)."""

    accepted: bool  # False: the job is over, or the host is unfit
    reason: str = ""  # the sentence that refuses it; "" when accepted
    heartbeat_interval: float = 1.0  # seconds until the next heartbeat is due


@dataclass(frozen=True)
class HeartbeatReply:
    """Answers a heartbeat."""

    heartbeat_interval: float = 1.0  # seconds until the next heartbeat is due


@dataclass(frozen=True)
class NextWorld:
    """Answers a worker that waits for a world. Both fields None: not decided yet, ask again."""

    world: WorldView | None = None  # in which the worker is a member
    stop: str | None = None  # why the worker must end
    addresses: tuple[str, ...] = ()  # members', by rank; none of a large world, or if one is not known
    # Members of a large world, in order: so many in a row, who had the ranks from that one on in the world that the
    # worker left, with the addresses that they had there; rank -1: others. Empty: too many runs, or another world.
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def is_undecided(self) -> bool:
        return self.world is None and self.stop is None

    def find_known(self, before: Mapping[int, str]) -> dict[int, str]:
        """By rank: the addresses that came with the world, and those of members whom the worker knew before."""
        known, rank = dict(enumerate(self.addresses)), 0
        for first, count in self.runs:
            known |= {
                rank + old - first: at for old, at in before.items() if 0 <= first <= old < first + count
            }
            rank += count
        return known


# ---- from slots


@dataclass(frozen=True)
class RegisterSlot(SlotRequest[Admission]):
    """A slot task has started on a host."""

    host: HostId  # the executor's id; where there is no Spark, the machine's name
    launch: int  # number of the launch that carries it, maybe with other attempts: R14 (duplicates)
    node: str = ""  # name of its machine, by which discovery may list it
    # Why the slot cannot take part, "" if it can: it has no device for its worker, or, as the server finds in `facts`,
    # the host's software does not fit.
    unfit: str = ""
    facts: dict[str, Any] = field(default_factory=dict)  # what the host runs: versions, pids, boot id; JSON
    kept: Checkpoint | None = None  # the newest commit of the run in its host's memory: R23 (kept commits)


@dataclass(frozen=True)
class Heartbeat(SlotRequest[HeartbeatReply]):
    """The slot is alive, and this is the state of its worker."""

    worker: WorkerId | None = None  # None while it has none
    state: str = ""  # state letter of the worker's process as in /proc, "" without a process
    waits: bool = False  # the worker's main thread waits for other workers; False: it works
    seconds: float = 0.0  # for how long it has waited or worked, in seconds
    stack: str = ""  # where the main thread is; "" unless it has worked for long or is stopped
    bitwise: bool = False  # its steps have the same bits, whichever workers compute them


@dataclass(frozen=True)
class WorkerStarted(SlotRequest[Acknowledged]):
    """The slot announces the process that is its worker now."""

    worker: WorkerId  # its number in the slot is higher than those of all workers that the slot had before
    kept: Checkpoint | None = None  # the newest commit that the host keeps now, as in `RegisterSlot`


@dataclass(frozen=True)
class WorkerExited(SlotRequest[Acknowledged]):
    """The slot saw the process of its worker end."""

    worker: WorkerId  # whose process it was
    exit_code: int  # as subprocess gives it; negative: the signal that killed it
    reason: str = ""  # the exit in words, for people
    out_of_memory: bool = False  # the kernel killed it because memory ran out
    crashed_at: str = ""  # Python frames in which native code crashed; "": it did not, or they are unknown


# ---- from workers


@dataclass(frozen=True)
class RequestNextWorld(WorkerRequest[NextWorld]):
    """The worker has left its world, if it had one, and asks for the next until it gets one (long poll)."""

    fence: Fence | None = None  # the world it left; None before its first
    position: Position | None = None  # where its state stands; None for a newcomer, which holds no state
    suspects: tuple[WorkerId, ...] = ()  # it blames them for its broken group; the server knows their ranks
    reason: str = ""  # why it asks; the driver shows it if its world broke
    planned: bool = False  # it stopped at a step boundary because a change was announced
    suspected_ranks: tuple[int, ...] = ()  # of the suspects in the world that it left
    address: str = ""  # at which peers reach it for life; "" if another process is to take its place


@dataclass(frozen=True)
class WorldFormed(WorkerRequest[Acknowledged]):
    """The worker has built the group of that generation."""

    fence: Fence  # of that generation


@dataclass(frozen=True)
class WorkerRaised(WorkerRequest[Acknowledged]):
    """User code raised an exception: R13 (deterministic failures). Sent before the worker closes its group."""

    fence: Fence | None  # of the world that it entered last; None before its first, or if loading failed
    position: Position | None  # of the state that it held; None: it held none
    fingerprint: str  # equal for exceptions that count as the same failure
    traceback: str  # cut to what a message can carry


@dataclass(frozen=True)
class WorkerDone(WorkerRequest[NextWorld]):
    """The end of training, R15 (end). The worker keeps its state until the reply (long poll): a stop, or a world."""

    fence: Fence  # of the world in which it did
    position: Position  # of the state that it keeps
    result: str  # JSON text
    address: str = ""  # as in `RequestNextWorld`


@dataclass(frozen=True)
class CheckpointWritten(WorkerRequest[Acknowledged]):
    """The worker has written a checkpoint. The driver publishes it: R18 (publication)."""

    checkpoint: Checkpoint  # complete in the store


@dataclass(frozen=True)
class CheckpointStoreFull(WorkerRequest[Acknowledged]):
    """The store of the checkpoints has no room for the worker's new one: the driver removes the oldest one."""

    number: int  # how many of the process's found no room, with this one: a message sent again has the same number


@dataclass(frozen=True)
class WorkerStraggles(WorkerRequest[Acknowledged]):
    """The worker keeps the others of its world waiting, and they would be quicker without it."""

    fence: Fence  # of that world; ignored once there is a newer one
    reason: str  # why it drains, as people read it


SlotMessage: TypeAlias = RegisterSlot | Heartbeat | WorkerStarted | WorkerExited
CheckpointMessage: TypeAlias = CheckpointWritten | CheckpointStoreFull
WorkerMessage: TypeAlias = RequestNextWorld | WorldFormed | WorkerRaised | WorkerDone | WorkerStraggles
DriverMessage: TypeAlias = SlotMessage | WorkerMessage | CheckpointMessage
