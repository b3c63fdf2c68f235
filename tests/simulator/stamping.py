"""Gives the driver machine's input the time at which a test or the simulator plays it."""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol.events import DriverEvent, Event, Received
from spark_elastic.protocol.messages import DriverMessage


def stamp_event(played: DriverEvent | DriverMessage, now: float) -> DriverEvent:
    """The event at time `now`; a message is received then."""
    return replace(played, now=now) if isinstance(played, Event) else Received(now, played)
