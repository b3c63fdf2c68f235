"""Slots that have a long poll open are counted once, however many they have."""

from __future__ import annotations

from spark_elastic.protocol.events import DriverEvent
from spark_elastic.rendezvous.routes import ConnectionTracker
from spark_elastic.testing.fakes import FakeClock


def test_slots_are_counted() -> None:
    posted: list[DriverEvent] = []
    tracker = ConnectionTracker(posted.append, FakeClock())
    with tracker.track_poll(("1-0", None)), tracker.track_poll(("1-0", "1-0.1")):
        assert tracker.slot_count == 1
        with tracker.track_poll(("1-0", None)), tracker.track_poll(("2-0", None)):
            assert tracker.slot_count == 2
        assert tracker.slot_count == 1
    assert tracker.slot_count == 0
    assert not posted
