"""A training process that the kernel kills because memory ran out: the log says so, and the third kill ends the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from elastic_collectives import Group
from spark_elastic.errors import OutOfMemory
from spark_elastic.protocol.types import WorldView
from spark_elastic.testing.fakes import CountingProgram
from spark_elastic.worker.program import Outcome, WorkerHandle
from tests.component.worker.losses import Job
from tests.patience import until
from tests.scenarios import Fault

LIMIT = 400 << 20  # bytes: room for the slots, their workers and their spares
GROUPS = Path("/sys/fs/cgroup")

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]


class Box:
    """A control group of its own for memory, under either version of the kernel's interface."""

    def __init__(self) -> None:
        first = GROUPS / "memory"
        self.path = (first if first.is_dir() else GROUPS) / f"elastic-{os.getpid()}"
        self._limit = "memory.limit_in_bytes" if first.is_dir() else "memory.max"

    def make(self) -> None:
        self.path.mkdir()
        (self.path / self._limit).write_text(str(LIMIT))

    def put(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box()
    try:
        made.make()
    except OSError as error:
        if made.path.is_dir():
            made.path.rmdir()
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield made
    until(lambda: not (made.path / "cgroup.procs").read_text())
    made.path.rmdir()


class MemoryHog(CountingProgram):
    """The last rank enters its slot, and with it what the slot starts later, into the box; then it takes memory."""

    def __init__(self, box: Box, on: bool) -> None:
        super().__init__(30, 0.02)
        self._box = box
        self._on = on

    def run(self, world: WorldView, group: Group, session: WorkerHandle) -> Outcome:
        if self._on and group.rank == group.size - 1:
            for pid in (os.getppid(), os.getpid()):
                self._box.put(pid)
            taken = bytearray(4 * LIMIT)
            taken[:: 1 << 12] = b"x" * (len(taken) >> 12)
        return super().run(world, group, session)


def test_running_out_of_memory_is_named_and_ends_the_job_after_two_repeats(box: Box, fault: Fault) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    job = Job(MemoryHog(box, bool(fault(lambda: True))), size=2)
    with pytest.raises(OutOfMemory, match=r"out of memory 3 times .*spark\.executor\.memoryOverhead"):
        job.run()
