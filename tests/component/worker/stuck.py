"""Programs whose one rank gets stuck, each in a way of its own."""

from __future__ import annotations

import ctypes

from elastic_collectives import Group
from spark_elastic.protocol.types import World
from spark_elastic.testing.counting import CountingProgram
from spark_elastic.worker.program import Outcome, Session

STUCK_SECONDS = 5


class HoldsTheGil(CountingProgram):
    """Rank 1 of the first world calls C code that keeps the interpreter's lock."""

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        if world.fence.generation == 1 and group.rank == 1:
            self.call_c_code()
        return super().run(world, group, session)

    def call_c_code(self) -> None:
        ctypes.PyDLL(None).sleep(STUCK_SECONDS)


class NeverReturns(HoldsTheGil):
    """The same for ever."""

    def call_c_code(self) -> None:
        ctypes.PyDLL(None).sleep(3600)


class Dawdles(CountingProgram):
    """Rank 1 of the first world takes its time in Python."""

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        if world.fence.generation == 1 and group.rank == 1:
            self.dawdle()
        return super().run(world, group, session)

    def dawdle(self) -> None:
        self._clock.sleep(STUCK_SECONDS)
