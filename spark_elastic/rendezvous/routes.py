"""What each request means: which driver event it posts, and what it is answered from the board.

Runs in the server's event loop thread. Handlers never block: long polls wait for the board, their own connection and
the clock together. It must not know sockets, signatures or the driver machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from spark_elastic.clock import Clock
from spark_elastic.errors import StaleGeneration
from spark_elastic.protocol import events
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.types import Fence, SlotId, WorkerId
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous import messages as m
from spark_elastic.rendezvous.board import Board, generation_scope
from spark_elastic.rendezvous.gate import Call, Handler, PeerGone

# Who is connected: turns broken and renewed long polls into events.
#
# Owned by the server's event loop thread; it must not know why somebody waits.


Peer = tuple[SlotId, WorkerId | None]


class Presence:
    """Who has a long poll open. A peer whose last one broke is lost until it asks again.

    A peer that dials anew before its old connection's end is seen is not lost in between.
    """

    def __init__(self, post: Callable[[DriverEvent], None], clock: Clock) -> None:
        self._post, self._clock = post, clock
        self._open: Counter[Peer] = Counter()
        self.slots = 0  # that have a long poll open
        self._lost: set[Peer] = set()

    def heard(self, peer: Peer) -> None:
        if peer in self._lost:
            self._lost.discard(peer)
            self._post(events.ConnectionBack(self._clock.now(), *peer))

    @contextmanager
    def waiting(self, peer: Peer) -> Iterator[None]:
        self._count(peer, 1)
        broken: PeerGone | None = None
        try:
            yield
        except PeerGone as gone:
            broken = gone
            raise
        finally:
            if not self._count(peer, -1) and broken is not None:
                self._lost.add(peer)
                self._post(events.ConnectionLost(self._clock.now(), *peer, reset=broken.failed))

    def _count(self, peer: Peer, change: int) -> int:
        """Change how many long polls the peer has open; returns the new number."""
        before = self._open[peer]
        now = self._open[peer] = before + change
        if not now:
            del self._open[peer]
        if peer[1] is None:
            self.slots += bool(now) - bool(before)
        return now


R = TypeVar("R")


class Routes:
    """Handlers of all requests over one board.

    admit: the refusing sentence for a slot's facts, None to let it in. on_logs: takes workers' output; on_report:
    their progress. No callable may block. beat_every: seconds between two beats of each of so many slots.
    """

    def __init__(
        self,
        board: Board,
        post: Callable[[DriverEvent], None],
        clock: Clock,
        on_logs: Callable[[m.LogLines], None],
        admit: Callable[[dict[str, Any]], str | None],
        on_report: Callable[[m.Report], None],
        beat_every: Callable[[int], float],
    ) -> None:
        self._board = board
        self._post = post
        self._clock = clock
        self._on_logs = on_logs
        self._admit = admit
        self._on_report = on_report
        self._beat_every = beat_every
        self._presence = Presence(post, clock)
        self._pace = m.Pace()  # the newest answer to a beat

    def handlers(self) -> Mapping[type[m.Request[Any]], Handler]:
        return {
            m.RegisterSlot: self._simple(self._register),
            m.Beat: self._simple(self._beat),
            m.Started: self._simple(self._started),
            m.Exited: self._simple(self._exited),
            m.LogLines: self._simple(self._logs),
            m.WatchSlot: self._watch_slot,
            m.JoinWorld: self._join,
            m.WatchWorker: self._watch_worker,
            m.Report: self._simple(self._report),
            m.Exchange: self._exchange,
            m.Formed: self._simple(self._formed),
            m.Failed: self._simple(self._failed),
            m.Done: self._done,
            m.WroteCheckpoint: self._simple(self._wrote_checkpoint),
            m.SetValues: self._simple(self._set),
            m.GetValues: self._get,
        }

    # ---- slots

    def _register(self, request: m.RegisterSlot) -> m.Admission:
        unfit = self._admit(request.facts) or ""
        self._presence.heard((request.slot, None))
        node = str(request.facts.get("host", ""))
        self._post(
            events.SlotRegistered(self._clock.now(), request.slot, request.host, request.launch, node, unfit)
        )
        refusal = self._board.ended or unfit
        return m.Admission(not refusal, refusal, beat_every=self._beat_every(self._presence.slots))

    def _beat(self, request: m.Beat) -> m.Pace:
        self._presence.heard((request.slot, None))
        self._post(
            events.SlotBeat(
                self._clock.now(), request.slot, request.worker, request.state,
                request.waits, request.seconds, request.stack,
            )
        )  # fmt: skip
        pace = m.Pace(self._beat_every(self._presence.slots), self._board.ended)
        if pace != self._pace:
            self._pace = pace
        return self._pace  # one object, so that it is encoded once

    def _started(self, request: m.Started) -> m.Acknowledged:
        self._board.place(request.worker, request.slot)
        self._post(events.WorkerStarted(self._clock.now(), request.slot, request.worker))
        return m.Acknowledged(self._board.ended)

    def _exited(self, request: m.Exited) -> m.Acknowledged:
        self._post(
            events.WorkerExited(
                self._clock.now(),
                request.worker,
                request.exit_code,
                request.reason,
                request.out_of_memory,
                request.crashed_at,
            )
        )
        return m.Acknowledged(self._board.ended)

    def _logs(self, request: m.LogLines) -> m.Acknowledged:
        self._on_logs(request)
        return m.Acknowledged(self._board.ended)

    async def _watch_slot(self, call: Call) -> m.SlotOrders:
        request = call.message
        assert isinstance(request, m.WatchSlot)
        peer = (request.slot, None)
        self._presence.heard(peer)

        def orders() -> m.SlotOrders | None:
            now = self._board.orders(request.slot, request.seen)
            return now if now.stop_worker or now.release is not None else None

        reply = await self._hold(call, peer, request.slot, orders)
        return reply or self._board.orders(request.slot, request.seen)

    # ---- workers

    async def _join(self, call: Call) -> m.NextWorld:
        request = call.message
        assert isinstance(request, m.JoinWorld)
        self._hear(request.worker, request.slot)
        event = events.WorkerJoins(
            self._clock.now(), request.worker, request.slot, request.fence, request.position,
            request.suspects, request.reason, request.planned,
        )  # fmt: skip
        return await self._next_world(call, (request.slot, request.worker), request.fence, event)

    async def _done(self, call: Call) -> m.NextWorld:
        request = call.message
        assert isinstance(request, m.Done)
        self._hear(request.worker, request.slot)
        event = events.WorkerDone(
            self._clock.now(), request.worker, request.fence, request.position, request.result
        )
        return await self._next_world(call, (request.slot, request.worker), request.fence, event)

    async def _next_world(
        self, call: Call, peer: tuple[SlotId, WorkerId], left: Fence | None, event: DriverEvent
    ) -> m.NextWorld:
        """The next world or the end; the driver hears `event` unless the answer is there already."""

        def told() -> m.NextWorld | None:
            stop = self._board.stop(peer[1])
            return self._board.next_world(peer[1], left) if stop is None else m.NextWorld(stop=stop)

        reply = told()
        if reply is None:
            self._post(event)
            reply = await self._hold(call, peer, peer[1], told)
        return reply or m.NextWorld()

    async def _watch_worker(self, call: Call) -> m.News:
        request = call.message
        assert isinstance(request, m.WatchWorker)
        self._hear(request.worker, request.slot)

        def news() -> m.News | None:
            now = self._board.news(request.worker)
            quiet = now.version == request.version and now.over == request.over and now.stop is None
            return None if quiet else now

        reply = await self._hold(call, (request.slot, request.worker), request.worker, news)
        return reply or self._board.news(request.worker)

    def _report(self, request: m.Report) -> m.Acknowledged:
        self._on_report(dataclasses.replace(request, numbers=codec.numbered(request.numbers)))
        return m.Acknowledged(self._board.stop(request.worker))

    async def _exchange(self, call: Call) -> m.Blobs:
        request = call.message
        assert isinstance(request, m.Exchange)
        self._hear(request.worker, request.slot)
        self._refuse_stale(request.fence)
        world = self._board.current(request.fence)
        member = None if world is None else world.member(request.worker)
        if world is None or member is None or member.rank != request.rank:
            raise StaleGeneration(f"{request.worker} is not rank {request.rank} of that world")
        scope = generation_scope(request.fence.generation)
        if self._board.hand_in(scope, request.name, request.rank, request.blob):
            self._board.waiters.wake(scope)

        def complete() -> m.Blobs | None:
            self._refuse_stale(request.fence)
            return self._board.blobs(request.name)

        reply = await self._hold(call, (request.slot, request.worker), scope, complete)
        if reply is not None:
            return reply
        absent = self._board.absent(scope, request.name)
        return m.Blobs(None, tuple(member.worker for member in world.members if member.rank in absent))

    def _formed(self, request: m.Formed) -> m.Acknowledged:
        self._hear(request.worker, request.slot)
        self._refuse_stale(request.fence)
        self._post(events.WorkerFormed(self._clock.now(), request.worker, request.fence))
        return m.Acknowledged(self._board.stop(request.worker))

    def _failed(self, request: m.Failed) -> m.Acknowledged:
        self._hear(request.worker, request.slot)
        self._post(
            events.WorkerFailed(
                self._clock.now(), request.worker, request.fence, request.position,
                request.fingerprint, request.traceback,
            )
        )  # fmt: skip
        return m.Acknowledged(self._board.stop(request.worker))

    def _wrote_checkpoint(self, request: m.WroteCheckpoint) -> m.Acknowledged:
        self._hear(request.worker, request.slot)
        self._post(events.CheckpointWritten(self._clock.now(), request.worker, request.checkpoint))
        return m.Acknowledged(self._board.stop(request.worker))

    def _hear(self, worker: WorkerId, slot: SlotId) -> None:
        self._board.place(worker, slot)
        self._presence.heard((slot, worker))

    def _refuse_stale(self, fence: Fence) -> None:
        reason = self._board.over(fence)
        if reason is not None:
            raise StaleGeneration(reason)

    # ---- the key-value store

    def _set(self, request: m.SetValues) -> m.Values:
        for key, value in zip(request.keys, request.values, strict=False):
            self._board.values.set(request.scope, key, value)
        self._board.waiters.wake(request.scope)
        return m.Values()

    async def _get(self, call: Call) -> m.Values:
        request = call.message
        assert isinstance(request, m.GetValues)

        def complete() -> m.Values | None:
            values = self._board.values.get(request.scope, request.keys)
            return None if request.wait and None in values else m.Values(values)

        reply = await self._hold(call, None, request.scope, complete)
        return reply or m.Values(self._board.values.get(request.scope, request.keys))

    # ---- waiting

    async def _hold(
        self, call: Call, peer: Peer | None, topic: str, ready: Callable[[], R | None]
    ) -> R | None:
        """What `ready` gives as soon as it gives something; None after its hold.

        Raises:
            PeerGone: the connection broke meanwhile (the peer, if any, is then lost).
        """
        reply = ready()
        if reply is not None:
            return reply
        if peer is None:
            return await self._wait(call, topic, ready)
        with self._presence.waiting(peer):
            return await self._wait(call, topic, ready)

    async def _wait(self, call: Call, topic: str, ready: Callable[[], R | None]) -> R | None:
        deadline = self._clock.now() + call.hold
        gone = asyncio.ensure_future(call.gone())
        try:
            while (left := deadline - self._clock.now()) > 0:
                wake = self._board.waiters.add(topic)
                try:
                    await asyncio.wait({wake, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._board.waiters.remove(topic, wake)
                if gone.done():
                    raise call.broken()
                reply = ready()
                if reply is not None:
                    return reply
            return None
        finally:
            gone.cancel()

    def _simple(self, answer: Callable[[Any], object]) -> Handler:
        """The handler of a request that is answered at once."""

        async def handler(call: Call) -> object:
            return answer(call.message)

        return handler
