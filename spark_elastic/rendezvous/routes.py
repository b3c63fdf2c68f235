"""The handlers of all requests: what they post to the driver, and what they answer from the server's state.

Runs in the server's event loop thread. Handlers never block: what must wait is returned as a long poll, which waits for
a change of the state, for the end of its connection and for its deadline at the same time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.errors import InvalidInput, StaleGeneration
from spark_elastic.protocol import events, messages
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.messages import (
    Acknowledged,
    DriverMessage,
    DriverRequest,
    NextWorld,
    SlotRequest,
    WorkerRequest,
)
from spark_elastic.protocol.types import Fence, SlotId, WorkerId
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.dispatcher import Handler
from spark_elastic.rendezvous.long_polls import LongPoll, Subject, Topic
from spark_elastic.rendezvous.messages import (
    REQUESTS,
    Addresses,
    CompareAndSet,
    Comparison,
    FindAddresses,
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

    def open_poll(self, peer: Peer) -> None:
        self._count(peer, 1)

    def close_poll(self, peer: Peer, reset: bool | None) -> None:
        """reset: None unless its connection broke; then, whether the network reset it."""
        if not self._count(peer, -1) and reset is not None:
            self._lost.add(peer)
            self._post(events.ConnectionLost(self._clock.now(), *peer, reset=reset))

    def _count(self, peer: Peer, change: int) -> int:
        """Change how many long polls the peer has open; returns the new number."""
        before = self._open[peer]
        now = self._open[peer] = before + change
        if not now:
            del self._open[peer]
        if peer[1] is None:
            self.slot_count += bool(now) - bool(before)
        return now


@dataclass(frozen=True)
class ServerCallbacks:
    """What the server calls for events, output and decisions. No callable may block."""

    # Takes the driver's events; called in the event loop's thread, as all but `on_logs` are.
    post: Callable[[DriverEvent], None]
    on_logs: Callable[[LogLines], None]  # takes workers' output; called in a thread of its own
    # Given the facts of a slot's host: the sentence that refuses the slot, None to admit it.
    admit: Callable[[dict[str, Any]], str | None] = lambda facts: None
    on_report: Callable[[Report], None] = lambda report: None  # takes workers' progress
    # Given the number of slots: seconds between two heartbeats of each.
    heartbeat_interval: Callable[[int], float] = lambda slots: 1.0


class Routes:
    """The handlers of all requests."""

    def __init__(self, state: ServerState, callbacks: ServerCallbacks, clock: Clock) -> None:
        self._state = state
        self._callbacks = callbacks
        self._clock = clock
        self._connections = ConnectionTracker(callbacks.post, clock)

    def handlers(self) -> Mapping[type[DriverRequest[Any]], Handler]:
        own: dict[type[DriverRequest[Any]], Handler] = {
            messages.RegisterSlot: self._register,
            messages.Heartbeat: self._heartbeat,
            messages.RequestNextWorld: self._next_world,
            messages.WorkerDone: self._next_world,
            LogLines: self._logs,
            WatchSlot: self._watch_slot,
            WatchWorker: self._watch_worker,
            Report: self._report,
            FindAddresses: self._find_addresses,
            SetValues: self._set,
            GetValues: self._get,
            ListKeys: self._list_keys,
            CompareAndSet: self._compare_and_set,
        }
        return {request: own.get(request, self._acknowledge) for request in REQUESTS}

    # ---- messages for the driver machine

    def _acknowledge(self, message: DriverMessage) -> Acknowledged:
        """Posts the message and answers at once."""
        if isinstance(message, messages.WorldFormed):
            self._refuse_stale(message.fence)
        self._receive(message)
        return Acknowledged(self._stop_reason(message))

    def _register(self, message: messages.RegisterSlot) -> messages.Admission:
        unfit = message.unfit or self._callbacks.admit(message.facts) or ""
        self._receive(dataclasses.replace(message, unfit=unfit))
        refusal = self._state.ended or unfit
        return messages.Admission(
            not refusal, refusal, self._callbacks.heartbeat_interval(self._connections.slot_count)
        )

    def _heartbeat(self, message: messages.Heartbeat) -> messages.HeartbeatReply:
        self._receive(message)
        interval = self._callbacks.heartbeat_interval(self._connections.slot_count)
        return messages.HeartbeatReply(interval, self._state.ended)

    def _next_world(self, message: messages.RequestNextWorld | messages.WorkerDone) -> object:
        """Answers with the next world or the end; posts the message unless the answer is there already."""

        def find_answer() -> NextWorld | None:
            stop = self._state.get_stop_reason(message.worker)
            if stop is not None:
                return NextWorld(stop=stop)
            return self._state.find_next_world(message.worker, message.fence)

        self._connections.mark_connected(_sender(message))
        self._state.set_address(message.worker, message.address)
        reply = find_answer()
        if reply is not None:
            return reply
        if isinstance(message, messages.RequestNextWorld):
            message = self._name_suspects(message)
        self._receive(message)
        return self._poll(_sender(message), (Subject.WORLD, message.worker), find_answer, NextWorld)

    def _name_suspects(self, message: messages.RequestNextWorld) -> messages.RequestNextWorld:
        world = self._state.find_world(message.fence) if message.suspected_ranks and message.fence else None
        members = () if world is None else world.members
        ranks = [rank for rank in message.suspected_ranks if 0 <= rank < len(members)]
        suspects = tuple(members[rank].worker for rank in ranks)
        return dataclasses.replace(message, suspects=(*message.suspects, *suspects)) if suspects else message

    def _receive(self, message: DriverMessage) -> None:
        self._connections.mark_connected(_sender(message))
        self._callbacks.post(events.Received(self._clock.now(), message))

    def _stop_reason(self, message: SlotRequest[Any] | WorkerRequest[Any]) -> str | None:
        """Why the sender must end."""
        if isinstance(message, WorkerRequest):
            return self._state.get_stop_reason(message.worker)
        return self._state.ended

    # ---- messages that the server answers by itself

    def _logs(self, message: LogLines) -> Acknowledged:
        self._callbacks.on_logs(message)
        return Acknowledged(self._state.ended)

    def _watch_slot(self, message: WatchSlot) -> object:
        self._connections.mark_connected(_sender(message))

        def get_commands() -> SlotCommands:
            return self._state.get_commands(message.slot, message.seen)

        def find_commands() -> SlotCommands | None:
            now = get_commands()
            return now if now.workers_to_stop or now.release is not None else None

        return self._poll(_sender(message), (Subject.COMMANDS, message.slot), find_commands, get_commands)

    def _watch_worker(self, message: WatchWorker) -> object:
        self._connections.mark_connected(_sender(message))

        def find_update() -> WorkerUpdate | None:
            now = self._state.get_update(message.worker)
            is_known = (
                now.version == message.version and now.ended_fence == message.ended_fence and now.stop is None
            )
            return None if is_known else now

        topic = Subject.UPDATE, message.worker
        return self._poll(
            _sender(message), topic, find_update, partial(self._state.get_update, message.worker)
        )

    def _report(self, message: Report) -> Acknowledged:
        self._callbacks.on_report(dataclasses.replace(message, numbers=codec.decode_numbers(message.numbers)))
        return Acknowledged(self._stop_reason(message))

    def _find_addresses(self, message: FindAddresses) -> object:
        self._connections.mark_connected(_sender(message))
        self._refuse_stale(message.fence)
        world = self._state.find_world(message.fence)
        if world is None or world.member(message.worker) is None:
            raise StaleGeneration(f"{message.worker} is no member of that world")
        if not all(0 <= rank < world.size for rank in message.ranks):
            raise InvalidInput(f"ranks must be in [0, {world.size})")

        def get_addresses() -> Addresses:
            self._refuse_stale(message.fence)
            return Addresses(self._state.find_addresses(message.ranks))

        def find_all() -> Addresses | None:
            now = get_addresses()
            return now if all(now.addresses) else None

        topic = Subject.VALUES, name_generation_scope(message.fence.generation)
        return self._poll(_sender(message), topic, find_all, get_addresses)

    def _refuse_stale(self, fence: Fence) -> None:
        reason = self._state.get_end_reason(fence)
        if reason is not None:
            raise StaleGeneration(reason)

    # ---- the key-value store

    def _set(self, message: SetValues) -> Values:
        for key, value in zip(message.keys, message.values, strict=False):
            self._state.values.set(message.scope, key, value)
        self._state.waiters.wake((Subject.VALUES, message.scope))
        return Values()

    def _get(self, message: GetValues) -> object:

        def find_values() -> Values | None:
            values = self._state.values.get(message.scope, message.keys)
            return None if message.wait and None in values else Values(values)

        def get_values() -> Values:
            return Values(self._state.values.get(message.scope, message.keys))

        return self._poll(None, (Subject.VALUES, message.scope), find_values, get_values)

    def _list_keys(self, message: ListKeys) -> Keys:
        return Keys(self._state.values.list_keys(message.scope, message.prefix))

    def _compare_and_set(self, message: CompareAndSet) -> Comparison:
        reply = self._state.values.compare_and_set(message)
        self._state.waiters.wake((Subject.VALUES, message.scope))
        return reply

    # ---- waiting

    def _poll(
        self,
        peer: Peer | None,
        topic: Topic,
        find_reply: Callable[[], object],
        get_last_reply: Callable[[], object],
    ) -> object:
        """What `find_reply` gives, if it gives something; else the poll that waits for it.

        Args:
            peer: lost if the connection breaks meanwhile; None: nobody is.
            get_last_reply: gives the reply once the poll was held as long as its sender allows.
        """
        reply = find_reply()
        if reply is not None:
            return reply
        if peer is None:
            return LongPoll(self._state.waiters, topic, find_reply, get_last_reply)
        self._connections.open_poll(peer)
        on_ended = partial(self._connections.close_poll, peer)
        return LongPoll(self._state.waiters, topic, find_reply, get_last_reply, on_ended)


def _sender(message: SlotRequest[Any] | WorkerRequest[Any]) -> Peer:
    return message.slot, message.worker if isinstance(message, WorkerRequest) else None
