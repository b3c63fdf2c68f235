"""A program whose one rank hangs."""

from __future__ import annotations

import ctypes
import os

from elastic_collectives import Group
from spark_elastic.protocol.types import WorldView
from spark_elastic.testing.fakes import CountingProgram
from spark_elastic.worker.program import Outcome, WorkerHandle


class NeverReturns(CountingProgram):
    """Rank 1 of the first world calls C code that keeps the interpreter's lock for ever."""

    def run(self, world: WorldView, group: Group, session: WorkerHandle) -> Outcome:
        if world.fence.generation == 1 and group.rank == 1:
            self.call_c_code()
        return super().run(world, group, session)

    def call_c_code(self) -> None:
        nothing_comes, _ = os.pipe()
        ctypes.PyDLL(None).read(nothing_comes, ctypes.create_string_buffer(1), 1)
