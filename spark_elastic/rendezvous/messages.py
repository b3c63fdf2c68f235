"""What driver, slots and workers say to each other, as values: one dataclass per request and per reply.

Each request names its path and the reply that answers it. Requests map onto the driver events of
`protocol.events` one to one. Nothing here knows HTTP, JSON or threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from spark_elastic.errors import PeersMissing
from spark_elastic.protocol.types import Checkpoint, Fence, HostId, Position, SlotId, WorkerId, World
from spark_elastic.rendezvous import codec

VERSION = 1  # of the wire; both sides must speak the same
OWN_WORDS = "spark_elastic: "  # begins a line that a slot says itself; such lines are told whatever is shown
BODY_AT_MOST = 8 << 20  # bytes of a request that the server reads
HOLD = 20.0  # seconds that the server holds a long poll at most

R_co = TypeVar("R_co", covariant=True)


class Request(Generic[R_co]):
    """Something to ask the driver; `R_co` is the class of its reply."""

    path: ClassVar[str]
    reply: ClassVar[type]


@dataclass(frozen=True)
class Acknowledged:
    """Taken note of. stop: why there is nothing more to do for the sender, None while there is."""

    stop: str | None = None


# ---- slots


@dataclass(frozen=True)
class Admission:
    """Whether a slot may carry a worker. reason: the refusing sentence, "" when accepted; it waits for the order to end
    then (R14). beat_every: seconds."""

    accepted: bool
    reason: str = ""
    beat_every: float = 1.0


@dataclass(frozen=True)
class Pace:
    """The answer to a beat. beat_every: seconds until the next is due. stop: as in `Acknowledged`."""

    beat_every: float = 1.0
    stop: str | None = None


@dataclass(frozen=True)
class RegisterSlot(Request[Admission]):
    """facts: what the host runs (versions, pids, boot id, hostname): JSON values by name."""

    path = "/v1/slot/register"
    reply = Admission
    slot: SlotId
    host: HostId
    launch: int
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat(Request[Pace]):
    """The slot is alive. Fields as in `protocol.events.SlotBeat`."""

    path = "/v1/slot/beat"
    reply = Pace
    slot: SlotId
    worker: WorkerId = ""
    state: str = ""
    waits: bool = False
    seconds: float = 0.0
    stack: str = ""


@dataclass(frozen=True)
class Started(Request[Acknowledged]):
    """The slot announces the process that is its worker now."""

    path = "/v1/slot/started"
    reply = Acknowledged
    slot: SlotId
    worker: WorkerId


@dataclass(frozen=True)
class Exited(Request[Acknowledged]):
    """The slot saw its worker end. exit_code as subprocess gives it (negative: signal)."""

    path = "/v1/slot/exited"
    reply = Acknowledged
    slot: SlotId
    worker: WorkerId
    exit_code: int
    reason: str = ""
    out_of_memory: bool = False
    crashed_at: str = ""


@dataclass(frozen=True)
class WorkerStop:
    """A worker shall end; `kill`: its slot kills it without asking."""

    worker: WorkerId
    reason: str
    kill: bool = False


@dataclass(frozen=True)
class SlotOrders:
    """What a slot shall do. seen: hand it back in the next watch, so that no order is lost or told twice.

    release: end the worker and return, and why; None: stay.
    """

    seen: int
    stop_worker: tuple[WorkerStop, ...] = ()
    release: str | None = None


@dataclass(frozen=True)
class WatchSlot(Request[SlotOrders]):
    """Long poll for orders newer than `seen` (0: all)."""

    path = "/v1/slot/watch"
    reply = SlotOrders
    slot: SlotId
    seen: int = 0


@dataclass(frozen=True)
class LogLines(Request[Acknowledged]):
    """Output of a worker; rank None before its first world."""

    path = "/v1/slot/logs"
    reply = Acknowledged
    slot: SlotId
    worker: WorkerId
    rank: int | None
    lines: tuple[str, ...]


# ---- workers


@dataclass(frozen=True)
class NextWorld:
    """The answer to one who waits for a world. All three empty: nothing yet, ask again.

    stop: end, and why.
    """

    world: World | None = None
    stop: str | None = None

    @property
    def wait(self) -> bool:
        return self.world is None and self.stop is None


@dataclass(frozen=True)
class JoinWorld(Request[NextWorld]):
    """Long poll for the world after `fence` (None: the first). Fields as in `protocol.events.WorkerJoins`."""

    path = "/v1/worker/join"
    reply = NextWorld
    worker: WorkerId
    slot: SlotId
    fence: Fence | None = None
    position: Position | None = None
    suspects: tuple[WorkerId, ...] = ()
    reason: str = ""
    planned: bool = False


@dataclass(frozen=True)
class News:
    """What a worker must hear at once. version: newest membership version, and its reason.

    over: the newest generation that is over, and why. stop: end, and why.
    """

    version: int
    reason: str = ""
    over: Fence | None = None
    why: str = ""
    stop: str | None = None


@dataclass(frozen=True)
class WatchWorker(Request[News]):
    """Long poll: answered when the version differs, a generation after `over` is over, or the worker is to stop.

    Asked by what was heard last, not by the world that the worker is in: a world that begins while the question is
    open cannot be missed.
    """

    path = "/v1/worker/watch"
    reply = News
    worker: WorkerId
    slot: SlotId
    over: Fence | None
    version: int


@dataclass(frozen=True)
class Blobs:
    """blobs: everyone's, in rank order; None while `missing` (workers) have not sent theirs."""

    blobs: tuple[bytes, ...] | None = None
    missing: tuple[WorkerId, ...] = ()


@dataclass(frozen=True)
class Report(Request[Acknowledged]):
    """Progress for people: a few numbers by name. Some may be lost. JSON has no NaN and no infinity: as text."""

    path = "/v1/worker/report"
    reply = Acknowledged
    worker: WorkerId
    slot: SlotId
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Exchange(Request[Blobs]):
    """Long poll: hand in the blob of `rank`, get those of all ranks. name: one of several exchanges of a world."""

    path = "/v1/worker/exchange"
    reply = Blobs
    worker: WorkerId
    slot: SlotId
    fence: Fence
    rank: int
    blob: bytes
    name: str = "mesh"


@dataclass(frozen=True)
class Formed(Request[Acknowledged]):
    """The worker has built the generation."""

    path = "/v1/worker/formed"
    reply = Acknowledged
    worker: WorkerId
    slot: SlotId
    fence: Fence


@dataclass(frozen=True)
class Failed(Request[Acknowledged]):
    """R13: user code raised."""

    path = "/v1/worker/failed"
    reply = Acknowledged
    worker: WorkerId
    slot: SlotId
    fence: Fence | None
    position: Position | None
    fingerprint: str
    traceback: str


@dataclass(frozen=True)
class Done(Request[NextWorld]):
    """R15, long poll: the worker reached the end; answered by the acknowledgement (stop) or another world."""

    path = "/v1/worker/done"
    reply = NextWorld
    worker: WorkerId
    slot: SlotId
    fence: Fence
    position: Position
    result: str


@dataclass(frozen=True)
class WroteCheckpoint(Request[Acknowledged]):
    """R18: a checkpoint was written; the driver decides whether it counts."""

    path = "/v1/worker/checkpoint"
    reply = Acknowledged
    worker: WorkerId
    slot: SlotId
    checkpoint: Checkpoint


# ---- the key-value store


@dataclass(frozen=True)
class Values:
    """In the order of the asked keys; None where a key has no value (yet)."""

    values: tuple[bytes | None, ...] = ()


@dataclass(frozen=True)
class SetValues(Request[Values]):
    """Store values[i] under keys[i] of a scope."""

    path = "/v1/kv/set"
    reply = Values
    scope: str
    keys: tuple[str, ...]
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class GetValues(Request[Values]):
    """Read keys. wait: long poll until all of them have a value."""

    path = "/v1/kv/get"
    reply = Values
    scope: str
    keys: tuple[str, ...]
    wait: bool = False


REQUESTS: tuple[type[Request[Any]], ...] = (
    RegisterSlot, Beat, Started, Exited, WatchSlot, LogLines,
    JoinWorld, WatchWorker, Report, Exchange, Formed, Failed, Done, WroteCheckpoint,
    SetValues, GetValues,
)  # fmt: skip


# The requests of a slot and of a worker as typed calls, over anything that can ask.
#
# Long polls come once (`join`, `watch`, `done`) but for `exchange`, which repeats until its answer or deadline. Errors
# as `RendezvousClient.ask` has them. Without state of their own; any thread.


R = TypeVar("R")


class Asks(Protocol):
    """What `RendezvousClient` offers."""

    def ask(self, request: Request[R], hold: float = 0.0, within: float | None = None) -> R: ...

    def now(self) -> float: ...

    def heard_at(self) -> float: ...


class SlotCalls:
    """What a slot task says."""

    def __init__(self, client: Asks, slot: SlotId) -> None:
        self._client = client
        self._slot = slot

    def register(self, host: HostId, job: int, facts: dict[str, Any]) -> Admission:
        return self._client.ask(RegisterSlot(self._slot, host, job, facts))

    def beat(
        self,
        worker: WorkerId = "",
        state: str = "",
        waits: bool = False,
        seconds: float = 0.0,
        stack: str = "",
    ) -> Pace:
        return self._client.ask(Beat(self._slot, worker, state, waits, seconds, stack))

    def started(self, worker: WorkerId) -> Acknowledged:
        return self._client.ask(Started(self._slot, worker))

    def exited(
        self,
        worker: WorkerId,
        exit_code: int,
        reason: str = "",
        out_of_memory: bool = False,
        crashed_at: str = "",
    ) -> Acknowledged:
        return self._client.ask(Exited(self._slot, worker, exit_code, reason, out_of_memory, crashed_at))

    def watch(self, seen: int, hold: float = HOLD, within: float | None = None) -> SlotOrders:
        """Orders after the first `seen`, at once when there are some; else after `hold` seconds, none."""
        return self._client.ask(WatchSlot(self._slot, seen), hold, within)

    def logs(self, worker: WorkerId, rank: int | None, lines: tuple[str, ...]) -> Acknowledged:
        return self._client.ask(LogLines(self._slot, worker, rank, lines))


class WorkerCalls:
    """What a worker says."""

    def __init__(self, client: Asks, worker: WorkerId, slot: SlotId) -> None:
        self._client = client
        self._worker = worker
        self._slot = slot

    def join(
        self,
        fence: Fence | None,
        position: Position | None,
        suspects: tuple[WorkerId, ...] = (),
        reason: str = "",
        planned: bool = False,
        hold: float = HOLD,
    ) -> NextWorld:
        """Ask for the world after `fence`; `wait` in the answer: repeat."""
        request = JoinWorld(self._worker, self._slot, fence, position, suspects, reason, planned)
        return self._client.ask(request, hold)

    def heard_at(self) -> float:
        """When the driver surely heard this worker or its slot last."""
        return self._client.heard_at()

    def watch(
        self, over: Fence | None, version: int, hold: float = HOLD, within: float | None = None
    ) -> News:
        """News once the version is not `version`, a generation after `over` is over, or this worker is to stop."""
        return self._client.ask(WatchWorker(self._worker, self._slot, over, version), hold, within)

    def report(self, numbers: dict[str, Any]) -> Acknowledged:
        return self._client.ask(Report(self._worker, self._slot, codec.worded(numbers)))

    def exchange(
        self, fence: Fence, rank: int, blob: bytes, timeout: float, name: str = "mesh"
    ) -> tuple[bytes, ...]:
        """Everyone's blob in rank order.

        Raises:
            StaleGeneration: the generation is over.
            PeersMissing: not all came within `timeout` seconds; names them.
        """
        request = Exchange(self._worker, self._slot, fence, rank, blob, name)
        deadline = self._client.now() + timeout
        while True:
            reply = self._client.ask(request, min(HOLD, max(0.0, deadline - self._client.now())))
            if reply.blobs is not None:
                return reply.blobs
            if self._client.now() >= deadline:
                raise PeersMissing(
                    f"Generation {fence.generation} was not formed within {timeout:g} s: "
                    f"no address came from {', '.join(reply.missing)}."
                )

    def formed(self, fence: Fence) -> Acknowledged:
        return self._client.ask(Formed(self._worker, self._slot, fence))

    def failed(
        self, fence: Fence | None, position: Position | None, fingerprint: str, traceback: str
    ) -> Acknowledged:
        return self._client.ask(Failed(self._worker, self._slot, fence, position, fingerprint, traceback))

    def wrote_checkpoint(self, checkpoint: Checkpoint) -> Acknowledged:
        """It counts once the driver has published it."""
        return self._client.ask(WroteCheckpoint(self._worker, self._slot, checkpoint))

    def done(self, fence: Fence, position: Position, result: str, hold: float = HOLD) -> NextWorld:
        """Report the result; `wait` in the answer: repeat until the acknowledgement or another world."""
        return self._client.ask(Done(self._worker, self._slot, fence, position, result), hold)
