"""Who is connected: turns broken and renewed long polls into events.

Owned by the server's event loop thread; it must not know why somebody waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark_elastic.clock import Clock
from spark_elastic.protocol import events
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.types import SlotId, WorkerId
from spark_elastic.rendezvous.gate import PeerGone

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
                self._post(events.ConnectionLost(self._clock.now(), *peer, failed=broken.failed))

    def _count(self, peer: Peer, change: int) -> int:
        """Change how many long polls the peer has open; returns the new number."""
        before = self._open[peer]
        now = self._open[peer] = before + change
        if not now:
            del self._open[peer]
        if peer[1] is None:
            self.slots += bool(now) - bool(before)
        return now
