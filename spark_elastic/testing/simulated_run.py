"""The durable side of a simulation: a run in a store of its own, the drivers that open it.

Store, lists and attempts are the real ones (`spark_elastic.state`), over memory; what takes time takes simulated time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.data.memory_store import memory_store
from spark_elastic.protocol import events as on
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position, World
from spark_elastic.state.checkpoint import Checkpoints, name_of
from spark_elastic.state.held_run import HeldRun
from spark_elastic.testing.durability import Durability
from spark_elastic.testing.fault_plan import DRIVER_TIMEOUT

if TYPE_CHECKING:
    from spark_elastic.testing.simulated_desk import SimDesk
    from spark_elastic.testing.simulation import Simulation

RUN = "simulated"
PART = "state"
Chain = tuple[int, int]


class SimRun:
    """make: a driver that holds the run."""

    def __init__(self, sim: Simulation, make: Callable[[HeldRun], SimDesk]) -> None:
        self.sim = sim
        self.durability = Durability(sim.story)
        self.desks: list[SimDesk] = []
        self._make = make
        self._store = memory_store()
        self._checkpoints = Checkpoints(self._store, RUN)

    def open(self) -> None:
        """A driver takes the run, and goes on from what counts."""
        held = HeldRun.take(self._store, RUN)
        self.durability.opened(held.attempt)
        self.desks.append(self._make(held))
        self.desks[-1].open()

    def close(self) -> None:
        """The run is over; whoever lost it is still there, and somebody ends it."""
        for desk in self.desks[:-1]:
            if not desk.over:
                desk.post(on.CancelRequested(0, "the run is over"))

    # ---- what befalls drivers and store

    def kill_driver(self, silent: bool) -> None:
        """Its slots end with it, or, where nothing tells them, once they have not heard it for long enough; another
        driver opens the run."""
        desk, rng = self.desks[-1], self.sim.rng
        desk.dead = True
        for slot in self.sim.slots.values():
            if slot.desk is desk:
                delay = DRIVER_TIMEOUT if silent else rng.uniform(0.0, 0.5)
                self.sim.at(delay, partial(slot.end, "its driver is gone", failed=True))
        self.sim.at(rng.uniform(0.05, 2.0), self.open)

    def take_over(self) -> None:
        """Another driver opens the run although this one lives; it has hosts of its own."""
        for _ in range(self.sim.plan.hosts):
            self.sim.add_host()
        self.open()

    def damage_newest(self) -> None:
        """Damage the newest checkpoint that counts, if an older one that counts is whole."""
        listed = self._checkpoints.published()
        if len(listed) > 1 and not self.durability.is_damaged(listed[1].name):
            self._store.write_bytes(self._object(listed[0].name), b"[0, 0, 0, 0, 0]")
            self.durability.damaged(listed[0].name)

    # ---- checkpoints

    def write_half(self, fence: Fence, position: Position) -> None:
        self._store.write_bytes(self._object(name_of(fence, position)), b"[0,")

    def write(self, fence: Fence, position: Position, chain: Chain) -> Checkpoint:
        data = json.dumps([position.epoch, position.phase, position.step, *chain]).encode()
        return self._checkpoints.write(fence, position, {PART: data})

    def load(self, world: World) -> tuple[Position, Chain]:
        """What the world begins from."""
        checkpoint, parts = self._checkpoints.read_newest(world.resume)
        self.durability.taken(world, checkpoint)
        epoch, phase, step, count, text = json.loads(parts[PART])
        return Position(epoch, Phase(phase), step), (count, text)

    def _object(self, name: str) -> str:
        return f"runs/{RUN}/checkpoints/{name}/{PART}"
