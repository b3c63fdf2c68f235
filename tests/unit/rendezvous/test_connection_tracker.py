"""Slots that have a long poll open are counted once, however many they have."""

from __future__ import annotations

from spark_elastic.protocol.events import DriverEvent
from spark_elastic.rendezvous.routes import ConnectionTracker
from spark_elastic.testing.fakes import FakeClock


def test_slots_are_counted() -> None:
    posted: list[DriverEvent] = []
    presence = ConnectionTracker(posted.append, FakeClock())
    with presence.waiting(("1-0", None)), presence.waiting(("1-0", "1-0.1")):
        assert presence.slots == 1
        with presence.waiting(("1-0", None)), presence.waiting(("2-0", None)):
            assert presence.slots == 2
        assert presence.slots == 1
    assert presence.slots == 0
    assert not posted
