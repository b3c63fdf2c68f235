"""Counting programs that make a short moment of the protocol long, so that a loss meets it."""

from __future__ import annotations

import sys

from elastic_collectives import CollectiveError, Group
from spark_elastic.protocol.types import Position, World
from spark_elastic.testing.counting import CountingProgram
from spark_elastic.worker.program import Outcome, Session

LONG = 1.5  # seconds


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Patient(CountingProgram):
    """Takes its time until a world of that generation or a later one has so many members, then is quick."""

    def __init__(self, steps: int, generation: int, size: int) -> None:
        super().__init__(steps)
        self._generation = generation
        self._size = size

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        there = world.fence.generation >= self._generation and world.size >= self._size
        self._seconds = 0.01 if there else 0.2
        return super().run(world, group, session)


class SlowSync(Patient):
    """Before it takes or hands over the state of a survivor, every rank tells and dwells."""

    def sync(self, world: World, group: Group) -> Position:
        if world.receivers and world.source is not None:
            say(f"syncs as rank {group.rank} of world {world.fence.generation}")
            self._clock.sleep(LONG)
        return super().sync(world, group)


class SlowReturn(Patient):
    """The survivors of the first world take their time to come back from it."""

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        try:
            return super().run(world, group, session)
        except CollectiveError:
            if world.fence.generation == 1:
                say("comes back slowly")
                self._clock.sleep(LONG)
            raise
