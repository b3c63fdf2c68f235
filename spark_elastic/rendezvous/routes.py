"""The handlers of all requests: what they post to the driver, and what they answer from the server's state.

Runs in the server's event loop thread. Handlers never block: a long poll waits for a change of the state, for the end
of its connection and for its deadline at the same time.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from spark_elastic.clock import Clock
from spark_elastic.errors import StaleGeneration
from spark_elastic.protocol import events, messages
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.messages import (
    Acknowledged,
    DriverMessage,
    NextWorld,
    Request,
    SlotRequest,
    WorkerRequest,
)
from spark_elastic.protocol.types import Fence, SlotId, WorkerId
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.auth_middleware import Call, Handler, PeerDisconnected
from spark_elastic.rendezvous.messages import (
    REQUESTS,
    Blobs,
    CompareAndSet,
    Comparison,
    ExchangeAddresses,
    GetValues,
    Keys,
    ListKeys,
    LogLines,
    Report,
    SetValues,
    SlotCommands,
    Values,
    WatchSlot,
    WatchWorker,
    WorkerUpdate,
)
from spark_elastic.rendezvous.server_state import ServerState, name_generation_scope

Peer = tuple[SlotId, WorkerId | None]


class ConnectionTracker:
    """Follows which slots and workers have a long poll open, and posts lost and restored connections.

    A peer is lost when its last open poll breaks, until its next request. A peer that dials again before the server
    sees the end of the old connection is not lost in between.
    """

    def __init__(self, post: Callable[[DriverEvent], None], clock: Clock) -> None:
        self._post, self._clock = post, clock
        self._open: Counter[Peer] = Counter()
        self.slot_count = 0  # slots that have a long poll open
        self._lost: set[Peer] = set()

    def mark_connected(self, peer: Peer) -> None:
        if peer in self._lost:
            self._lost.discard(peer)
            self._post(events.ConnectionBack(self._clock.now(), *peer))

    @contextmanager
    def track_poll(self, peer: Peer) -> Iterator[None]:
        self._count(peer, 1)
        lost: PeerDisconnected | None = None
        try:
            yield
        except PeerDisconnected as error:
            lost = error
            raise
        finally:
            if not self._count(peer, -1) and lost is not None:
                self._lost.add(peer)
                self._post(events.ConnectionLost(self._clock.now(), *peer, reset=lost.reset))

    def _count(self, peer: Peer, change: int) -> int:
        """Change how many long polls the peer has open; returns the new number."""
        before = self._open[peer]
        now = self._open[peer] = before + change
        if not now:
            del self._open[peer]
        if peer[1] is None:
            self.slot_count += bool(now) - bool(before)
        return now


R = TypeVar("R")


def _admit_all(facts: dict[str, Any]) -> str | None:
    return None


def _ignore_report(report: Report) -> None:
    """Drops it."""


def _one_second(slots: int) -> float:
    return 1.0


@dataclass(frozen=True)
class ServerCallbacks:
    """What the server calls for events, output and decisions. No callable may block."""

    # Takes the driver's events; called in the event loop's thread, as all but `on_logs` are.
    post: Callable[[DriverEvent], None]
    on_logs: Callable[[LogLines], None]  # takes workers' output; called in a thread of its own
    # Given the facts of a slot's host: the sentence that refuses the slot, None to admit it.
    admit: Callable[[dict[str, Any]], str | None] = _admit_all
    on_report: Callable[[Report], None] = _ignore_report  # takes workers' progress
    # Given the number of slots: seconds between two heartbeats of each.
    heartbeat_interval: Callable[[int], float] = _one_second


class Routes:
    """The handlers of all requests."""

    def __init__(self, state: ServerState, callbacks: ServerCallbacks, clock: Clock) -> None:
        self._state = state
        self._callbacks = callbacks
        self._clock = clock
        self._connections = ConnectionTracker(callbacks.post, clock)
        self._heartbeat_reply = messages.HeartbeatReply()  # the newest one

    def handlers(self) -> Mapping[type[Request[Any]], Handler]:
        own: dict[type[Request[Any]], Handler] = {
            messages.RegisterSlot: self._register,
            messages.Heartbeat: self._heartbeat,
            messages.RequestNextWorld: self._next_world,
            messages.WorkerDone: self._next_world,
            LogLines: self._logs,
            WatchSlot: self._watch_slot,
            WatchWorker: self._watch_worker,
            Report: self._report,
            ExchangeAddresses: self._exchange,
            SetValues: self._set,
            GetValues: self._get,
            ListKeys: self._list_keys,
            CompareAndSet: self._compare_and_set,
        }
        return {request: own.get(request, self._acknowledge) for request in REQUESTS}

    # ---- messages for the driver machine

    async def _acknowledge(self, call: Call) -> Acknowledged:
        """Posts the message and answers at once."""
        message: DriverMessage = call.message
        if isinstance(message, messages.WorldFormed):
            self._refuse_stale(message.fence)
        self._receive(message)
        return Acknowledged(self._stop_reason(message))

    async def _register(self, call: Call) -> messages.Admission:
        message: messages.RegisterSlot = call.message
        unfit = message.unfit or self._callbacks.admit(message.facts) or ""
        self._receive(dataclasses.replace(message, unfit=unfit))
        refusal = self._state.ended or unfit
        return messages.Admission(
            not refusal, refusal, self._callbacks.heartbeat_interval(self._connections.slot_count)
        )

    async def _heartbeat(self, call: Call) -> messages.HeartbeatReply:
        self._receive(call.message)
        reply = messages.HeartbeatReply(
            self._callbacks.heartbeat_interval(self._connections.slot_count), self._state.ended
        )
        if reply != self._heartbeat_reply:
            self._heartbeat_reply = reply
        return self._heartbeat_reply  # one object, so that it is encoded once

    async def _next_world(self, call: Call) -> NextWorld:
        """Answers with the next world or the end; posts the message unless the answer is there already."""
        message: messages.RequestNextWorld | messages.WorkerDone = call.message

        def find_answer() -> NextWorld | None:
            stop = self._state.get_stop_reason(message.worker)
            if stop is not None:
                return NextWorld(stop=stop)
            return self._state.find_next_world(message.worker, message.fence)

        self._connections.mark_connected(_sender(message))
        reply = find_answer()
        if reply is None:
            self._receive(message)
            reply = await self._poll(call, _sender(message), message.worker, find_answer)
        return reply or NextWorld()

    def _receive(self, message: DriverMessage) -> None:
        self._connections.mark_connected(_sender(message))
        self._callbacks.post(events.Received(self._clock.now(), message))

    def _stop_reason(self, message: SlotRequest[Any] | WorkerRequest[Any]) -> str | None:
        """Why the sender must end."""
        if isinstance(message, WorkerRequest):
            return self._state.get_stop_reason(message.worker)
        return self._state.ended

    # ---- messages that the server answers by itself

    async def _logs(self, call: Call) -> Acknowledged:
        self._callbacks.on_logs(call.message)
        return Acknowledged(self._state.ended)

    async def _watch_slot(self, call: Call) -> SlotCommands:
        message: WatchSlot = call.message
        self._connections.mark_connected(_sender(message))

        def find_commands() -> SlotCommands | None:
            now = self._state.get_commands(message.slot, message.seen)
            return now if now.workers_to_stop or now.release is not None else None

        reply = await self._poll(call, _sender(message), message.slot, find_commands)
        return reply or self._state.get_commands(message.slot, message.seen)

    async def _watch_worker(self, call: Call) -> WorkerUpdate:
        message: WatchWorker = call.message
        self._connections.mark_connected(_sender(message))

        def find_update() -> WorkerUpdate | None:
            now = self._state.get_update(message.worker)
            is_known = (
                now.version == message.version and now.ended_fence == message.ended_fence and now.stop is None
            )
            return None if is_known else now

        reply = await self._poll(call, _sender(message), message.worker, find_update)
        return reply or self._state.get_update(message.worker)

    async def _report(self, call: Call) -> Acknowledged:
        message: Report = call.message
        self._callbacks.on_report(dataclasses.replace(message, numbers=codec.decode_numbers(message.numbers)))
        return Acknowledged(self._stop_reason(message))

    async def _exchange(self, call: Call) -> Blobs:
        message: ExchangeAddresses = call.message
        self._connections.mark_connected(_sender(message))
        self._refuse_stale(message.fence)
        world = self._state.find_world(message.fence)
        member = None if world is None else world.member(message.worker)
        if world is None or member is None or member.rank != message.rank:
            raise StaleGeneration(f"{message.worker} is not rank {message.rank} of that world")
        scope = name_generation_scope(message.fence.generation)
        # Wakes the ranks once, when the last part is there: not all of them at each part.
        if self._state.add_blob(scope, message.name, message.rank, message.blob):
            self._state.waiters.wake(scope)

        def find_blobs() -> Blobs | None:
            self._refuse_stale(message.fence)
            return self._state.get_blobs(message.name)

        reply = await self._poll(call, _sender(message), scope, find_blobs)
        if reply is not None:
            return reply
        absent = self._state.find_missing_ranks(scope, message.name)
        return Blobs(None, tuple(member.worker for member in world.members if member.rank in absent))

    def _refuse_stale(self, fence: Fence) -> None:
        reason = self._state.get_end_reason(fence)
        if reason is not None:
            raise StaleGeneration(reason)

    # ---- the key-value store

    async def _set(self, call: Call) -> Values:
        message: SetValues = call.message
        for key, value in zip(message.keys, message.values, strict=False):
            self._state.values.set(message.scope, key, value)
        self._state.waiters.wake(message.scope)
        return Values()

    async def _get(self, call: Call) -> Values:
        message: GetValues = call.message

        def find_values() -> Values | None:
            values = self._state.values.get(message.scope, message.keys)
            return None if message.wait and None in values else Values(values)

        reply = await self._poll(call, None, message.scope, find_values)
        return reply or Values(self._state.values.get(message.scope, message.keys))

    async def _list_keys(self, call: Call) -> Keys:
        message: ListKeys = call.message
        return Keys(self._state.values.list_keys(message.scope, message.prefix))

    async def _compare_and_set(self, call: Call) -> Comparison:
        message: CompareAndSet = call.message
        reply = self._state.values.compare_and_set(message)
        self._state.waiters.wake(message.scope)
        return reply

    # ---- waiting

    async def _poll(
        self, call: Call, peer: Peer | None, topic: str, ready: Callable[[], R | None]
    ) -> R | None:
        """What `ready` gives as soon as it gives something; None after its hold.

        Raises:
            PeerDisconnected: the connection broke meanwhile (the peer, if any, is then lost).
        """
        reply = ready()
        if reply is not None:
            return reply
        if peer is None:
            return await self._wait_until_ready(call, topic, ready)
        with self._connections.track_poll(peer):
            return await self._wait_until_ready(call, topic, ready)

    async def _wait_until_ready(self, call: Call, topic: str, ready: Callable[[], R | None]) -> R | None:
        deadline = self._clock.now() + call.hold
        disconnected = asyncio.ensure_future(call.wait_disconnected())
        try:
            while (left := deadline - self._clock.now()) > 0:
                wake = self._state.waiters.add(topic)
                try:
                    await asyncio.wait(
                        {wake, disconnected}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    self._state.waiters.remove(topic, wake)
                if disconnected.done():
                    raise call.get_disconnect_error()
                reply = ready()
                if reply is not None:
                    return reply
            return None
        finally:
            disconnected.cancel()


def _sender(message: SlotRequest[Any] | WorkerRequest[Any]) -> Peer:
    return message.slot, message.worker if isinstance(message, WorkerRequest) else None
