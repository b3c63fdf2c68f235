"""The requests of a slot and of a worker as typed calls, over anything that can ask.

Long polls come once (`join`, `watch`, `done`) but for `exchange`, which repeats until its answer or deadline. Errors
as `RendezvousClient.ask` has them. Without state of their own; any thread.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from spark_elastic.errors import PeersMissing
from spark_elastic.protocol.types import Checkpoint, Fence, HostId, Position, SlotId, WorkerId
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous import messages as m

R = TypeVar("R")


class Asks(Protocol):
    """What `RendezvousClient` offers."""

    def ask(self, request: m.Request[R], hold: float = 0.0, within: float | None = None) -> R: ...

    def now(self) -> float: ...

    def heard_at(self) -> float: ...


class SlotCalls:
    """What a slot task says."""

    def __init__(self, client: Asks, slot: SlotId) -> None:
        self._client = client
        self._slot = slot

    def register(self, host: HostId, job: int, facts: dict[str, Any]) -> m.Admission:
        return self._client.ask(m.RegisterSlot(self._slot, host, job, facts))

    def beat(
        self,
        worker: WorkerId = "",
        state: str = "",
        waits: bool = False,
        seconds: float = 0.0,
        stack: str = "",
    ) -> m.Pace:
        return self._client.ask(m.Beat(self._slot, worker, state, waits, seconds, stack))

    def started(self, worker: WorkerId) -> m.Acknowledged:
        return self._client.ask(m.Started(self._slot, worker))

    def exited(
        self,
        worker: WorkerId,
        exit_code: int,
        reason: str = "",
        out_of_memory: bool = False,
        crashed_at: str = "",
    ) -> m.Acknowledged:
        return self._client.ask(m.Exited(self._slot, worker, exit_code, reason, out_of_memory, crashed_at))

    def watch(self, seen: int, hold: float = m.HOLD, within: float | None = None) -> m.SlotOrders:
        """Orders after the first `seen`, at once when there are some; else after `hold` seconds, none."""
        return self._client.ask(m.WatchSlot(self._slot, seen), hold, within)

    def logs(self, worker: WorkerId, rank: int | None, lines: tuple[str, ...]) -> m.Acknowledged:
        return self._client.ask(m.LogLines(self._slot, worker, rank, lines))


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
        hold: float = m.HOLD,
    ) -> m.NextWorld:
        """Ask for the world after `fence`; `wait` in the answer: repeat."""
        request = m.JoinWorld(self._worker, self._slot, fence, position, suspects, reason, planned)
        return self._client.ask(request, hold)

    def heard_at(self) -> float:
        """When the driver surely heard this worker or its slot last."""
        return self._client.heard_at()

    def watch(
        self, over: Fence | None, version: int, hold: float = m.HOLD, within: float | None = None
    ) -> m.News:
        """News once the version is not `version`, a generation after `over` is over, or this worker is to stop."""
        return self._client.ask(m.WatchWorker(self._worker, self._slot, over, version), hold, within)

    def report(self, numbers: dict[str, Any]) -> m.Acknowledged:
        return self._client.ask(m.Report(self._worker, self._slot, codec.worded(numbers)))

    def exchange(
        self, fence: Fence, rank: int, blob: bytes, timeout: float, name: str = "mesh"
    ) -> tuple[bytes, ...]:
        """Everyone's blob in rank order.

        Raises:
            StaleGeneration: the generation is over.
            PeersMissing: not all came within `timeout` seconds; names them.
        """
        request = m.Exchange(self._worker, self._slot, fence, rank, blob, name)
        deadline = self._client.now() + timeout
        while True:
            reply = self._client.ask(request, min(m.HOLD, max(0.0, deadline - self._client.now())))
            if reply.blobs is not None:
                return reply.blobs
            if self._client.now() >= deadline:
                raise PeersMissing(
                    f"Generation {fence.generation} was not formed within {timeout:g} s: "
                    f"no address came from {', '.join(reply.missing)}."
                )

    def formed(self, fence: Fence) -> m.Acknowledged:
        return self._client.ask(m.Formed(self._worker, self._slot, fence))

    def failed(
        self, fence: Fence | None, position: Position | None, fingerprint: str, traceback: str
    ) -> m.Acknowledged:
        return self._client.ask(m.Failed(self._worker, self._slot, fence, position, fingerprint, traceback))

    def wrote_checkpoint(self, checkpoint: Checkpoint) -> m.Acknowledged:
        """It counts once the driver has published it."""
        return self._client.ask(m.WroteCheckpoint(self._worker, self._slot, checkpoint))

    def done(self, fence: Fence, position: Position, result: str, hold: float = m.HOLD) -> m.NextWorld:
        """Report the result; `wait` in the answer: repeat until the acknowledgement or another world."""
        return self._client.ask(m.Done(self._worker, self._slot, fence, position, result), hold)
