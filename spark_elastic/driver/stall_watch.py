"""Watches the slots' beats for members that keep others waiting, and names them: in the log, and to the driver machine.

Stands between the server and the driver's inbox. `post` is called by the server's thread, `world` by the driver
loop's; the current world and since when it is over, each replaced whole, are all that they share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from spark_elastic.clock import Clock
from spark_elastic.protocol.driver.stall import find_stalls
from spark_elastic.protocol.events import DriverEvent, Received, WorkerStalled
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import SlotId, WorkerId, World

log = logging.getLogger("spark_elastic.driver")

LOOK_EVERY = 0.2  # seconds
SPARE_BEATS = 100  # of slots that are in no world now


class StallWatch:
    """after: seconds that others have to wait for a member before it is named, once per world.

    beat_every: seconds between two beats of each of so many slots.
    """

    def __init__(
        self,
        post: Callable[[DriverEvent], None],
        clock: Clock,
        after: float,
        beat_every: Callable[[int], float],
    ) -> None:
        self._forward = post
        self._clock = clock
        self._after = after
        self._beat_every = beat_every
        self._world: tuple[World, float] | None = None
        self._over: float | None = None
        self._beats: dict[SlotId, tuple[float, Heartbeat]] = {}
        self._named: set[tuple[int, WorkerId]] = set()
        self._next_look = 0.0

    def world(self, world: World) -> None:
        """The members to watch from now on."""
        self._over = None
        self._world = world, self._clock.now()

    def over(self) -> None:
        """The world is; its members are to come back for the next."""
        self._over = self._clock.now()

    def post(self, event: DriverEvent) -> None:
        """Hand an event on; a beat may be the one that shows a stall."""
        self._forward(event)
        if not isinstance(event, Received) or not isinstance(event.message, Heartbeat):
            return
        self._beats[event.message.slot] = event.now, event.message
        if self._world is not None and event.now >= self._next_look:
            self._next_look = event.now + LOOK_EVERY
            self._look(*self._world, event.now)

    def _look(self, world: World, since: float, now: float) -> None:
        if len(self._beats) > 2 * world.size + SPARE_BEATS:  # slots come and go for as long as a job lasts
            members = {member.slot for member in world.members}
            self._beats = {slot: beat for slot, beat in self._beats.items() if slot in members}
        every = self._beat_every(len(self._beats))
        for stall in find_stalls(world, self._beats, now, self._after, since, every, self._over):
            once = world.fence.generation, stall.member.worker
            if once not in self._named:
                self._named.add(once)
                log.warning("%s", stall.text)
                self._forward(WorkerStalled(now, stall.member.worker, world.fence, stall.text))
