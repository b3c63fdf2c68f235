"""Slots that have a long poll open are counted once, however many they have."""

from __future__ import annotations

from spark_elastic.protocol.events import DriverEvent
from spark_elastic.rendezvous.routes import ConnectionTracker
from spark_elastic.testing.fakes import FakeClock


def test_slots_are_counted() -> None:
    posted: list[DriverEvent] = []
    tracker = ConnectionTracker(posted.append, FakeClock())
    slot, worker, other = ("1-0", None), ("1-0", "1-0.1"), ("2-0", None)
    counts = []
    for change, peer in ((1, slot), (1, worker), (1, slot), (1, other), (-1, slot), (-1, other), (-1, slot)):
        tracker.open_poll(peer) if change > 0 else tracker.close_poll(peer, None)
        counts.append(tracker.slot_count)
    assert counts == [1, 1, 1, 2, 2, 1, 0]
    assert not posted
