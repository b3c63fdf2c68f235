"""Losses at every moment of the protocol, on real processes; the result shows any step lost, doubled or torn.

Who keeps the others waiting is named (P5), and so is the kernel where it kills a process because memory ran out.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import pytest

from elastic_collectives import Group
from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import OutOfMemory
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.protocol.types import WorldView
from spark_elastic.testing.fakes import CountingProgram
from spark_elastic.worker.program import Outcome, WorkerHandle
from tests.component.worker.losses import Job, sizes
from tests.component.worker.moments import HeldProgram, NeverReturns, SlowReturn, SlowSync
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]


def kill_worker(job: Job, place: int) -> None:
    job.workers()[place].kill()


def count_killed(job: Job) -> int:
    """How many workers; one that leaves at the end is an exit, too."""
    return sum('"WorkerExited"' in line and '"exit_code":-9' in line for line in job.journal)


@pytest.mark.parametrize("world", [1, 2])
def test_training_survives_a_loss_while_a_world_forms(world: int, fault: Fault) -> None:
    job = Job(HeldProgram(30, 0.02), until=lambda now: len(now.sizes) > world)
    job.act_at_step(10, lambda: kill_worker(job, 2))
    job.act_at_world(world, lambda: fault(kill_worker, job, 0))
    result = job.run()
    assert len(sizes(result)) >= world + 1
    assert any(f"world {world} is over" in line for line in job.journal)


@pytest.mark.parametrize("role", ["source", "receiver"])
def test_training_survives_a_loss_during_sync(role: str, fault: Fault) -> None:
    """The source dies while it hands over its state, or the newcomer while it takes it."""
    job = Job(SlowSync(20, 0.02), size=3, room=2)
    job.act_at_step(1, lambda: job.cluster.add_room(1))
    job.act_at_line(
        "syncs as rank 2 of world 2", lambda: fault(kill_worker, job, 0 if role == "source" else 2)
    )
    result = job.run(num_workers=2)
    assert sizes(result)[:2] == [2, 3]
    assert any("world 2 is over" in line for line in job.journal)
    assert not any("from the beginning: nobody" in line for line in job.journal)


def test_training_survives_a_second_loss_while_the_survivors_regroup(fault: Fault) -> None:
    job = Job(SlowReturn(20, 0.02), size=4)
    job.act_at_step(3, lambda: kill_worker(job, 0))
    job.act_at_line("comes back slowly", lambda: fault(kill_worker, job, 1))
    result = job.run()
    assert count_killed(job) == 2
    assert sizes(result)[0] == 4


@pytest.mark.scenario("G7")
def test_a_newcomer_can_join_during_a_reset(fault: Fault) -> None:
    job = Job(SlowReturn(20, 0.02), size=4, room=3, until=lambda now: now.sizes[-1] == 4, faults=fault.on)
    job.act_at_step(3, lambda: kill_worker(job, 0))
    job.act_at_line("comes back slowly", lambda: fault(job.cluster.add_room, 1))
    result = job.run(num_workers=3)
    assert sizes(result)[0] == 3
    assert sizes(result)[-1] == 4


@pytest.mark.scenario("G7")
def test_training_survives_two_membership_changes_within_a_second(fault: Fault) -> None:
    """One host leaves as planned and another dies; two slots are free again afterwards."""
    job = Job(HeldProgram(20, 0.02), until=lambda now: now.sizes[-1] == 3 > min(now.sizes), faults=fault.on)

    def inject_fault() -> None:
        first, second, _ = sorted(job.cluster.slots())
        reason = "it is wanted elsewhere"
        fault(job.post, DrainRequested(SystemClock().now(), reason, host=f"host-{first}"))
        fault(job.cluster.kill, second)

    job.act_at_step(3, inject_fault)
    result = job.run()
    assert min(sizes(result)) < 3
    assert sizes(result)[-1] == 3


@pytest.mark.scenario("G7")
def test_a_newcomer_that_leaves_again_stops_no_worker(fault: Fault) -> None:
    """The host that comes is drained before its worker is warm; what stops for a newcomer is for the next host's."""
    job = Job(HeldProgram(20, 0.02), size=3, room=2, faults=fault.on)
    came: set[int] = set()

    def add_room_and_kill() -> None:
        there = job.cluster.slots().keys()
        job.cluster.add_room(1)
        came.update(until(lambda: job.cluster.slots().keys() - there))
        job.post(DrainRequested(SystemClock().now(), "it is not wanted after all", host=f"host-{min(came)}"))
        until(lambda: min(came) not in job.cluster.slots())

    job.act_at_step(5, lambda: fault(add_room_and_kill))
    result = job.run(num_workers=2)
    assert any("drains: it is not wanted after all" in line for line in job.journal)
    assert not any(f"{min(came)}-0" in world.reason for world in result.worlds[1:])
    assert sizes(result) in ([2], [2, 3])


@pytest.mark.scenario("G8")
def test_fewer_than_min_workers_wait_for_another_worker_and_continue(fault: Fault) -> None:
    job = Job(HeldProgram(20, 0.02), until=lambda now: len(now.sizes) >= 2, faults=fault.on)

    def inject_fault() -> None:
        for number in sorted(job.cluster.slots())[1:]:
            fault(job.cluster.kill, number)

    job.act_at_step(10, inject_fault)
    result = job.run(min_workers=3)
    assert sizes(result) == [3, 3]
    assert "continues from epoch 1, train, step" in result.worlds[1].reason


@pytest.mark.scenario("G9")
def test_training_survives_many_resets_within_one_epoch(fault: Fault) -> None:
    job = Job(HeldProgram(50, 0.03), until=lambda now: len(now.sizes) >= 5, faults=fault.on)
    for number, step in enumerate((10, 20, 30, 40)):
        job.act_at_step(step, partial(fault, kill_worker, job, number % 2), world=number + 1)
    result = job.run()
    assert count_killed(job) == 4
    assert len(sizes(result)) >= 5


@pytest.mark.scenario("G4")
def test_a_silent_host_is_evicted_and_fenced_when_it_wakes(fault: Fault) -> None:
    """Slot and worker are paused, no connection breaks; when they resume, the old worker is in no world."""
    job = Job(HeldProgram(20, 0.02), until=lambda now: 3 in now.sizes[2:], faults=fault.on, warm=False)
    frozen: list[psutil.Process] = []

    def freeze() -> None:
        slot = psutil.Process(job.cluster.slots()[max(job.cluster.slots())])
        frozen.extend([slot, *slot.children()])
        for process in frozen:
            fault(process.send_signal, signal.SIGSTOP)

    def thaw() -> None:
        for process in reversed(frozen):  # the slot comes last, since it kills its worker
            process.send_signal(signal.SIGCONT)

    job.act_at_step(3, freeze)
    job.act_at_world(2, thaw)
    result = job.run(lease=6.0)
    assert sizes(result)[:2] == [3, 2]
    assert 3 in sizes(result)[2:], "its slot brings another worker"
    assert any("its slot was silent for" in line for line in job.journal)
    assert not frozen[1].is_running()


def entry(job: Job, text: str) -> str:
    """The first line of the journal that contains `text`."""
    return next(line for line in job.journal if text in line)


@pytest.mark.scenario("G4")
def test_p5_r24_a_stopped_worker_is_evicted_soon_and_named_with_its_last_stack(fault: Fault) -> None:
    job = Job(HeldProgram(60, 0.03), until=lambda now: len(now.sizes) >= 2, faults=fault.on)
    # Stopped long enough after its begin for a sample of its stack to be there.
    job.act_at_step(45, lambda: fault(job.workers()[1].send_signal, signal.SIGSTOP))
    result = job.run(lease=10.0)
    lost = entry(job, "is lost: its process has not run for")
    seen = re.search(r"run for ([\d.]+) s, last seen in .*run \((testing/|worker/moments)", lost)
    assert seen, lost
    assert float(seen[1]) < 5.0, "R24: others wait for it"
    assert sizes(result)[0] == 3
    assert entry(job, "world 1 is over")


def test_p5_a_hanging_worker_and_its_stack_are_named_to_its_peers(caplog: pytest.LogCaptureFixture) -> None:
    """C code holds its interpreter's lock for ever: no thread of Python's could tell where it is; its slot still sends
    heartbeats."""
    slow_to_name = ElasticConfig(stall_after=4.0)  # its stack is known three seconds after it hangs
    job = Job(NeverReturns(20, 0.03), size=2, collective_timeout=7.0, config=slow_to_name)
    job.run(regroup_timeout=2.0)
    stalls = [said for said in caplog.messages if "has kept others waiting" in said]
    stuck = "last seen in call_c_code (worker/moments.py:"
    assert any(said.startswith("rank 1 (worker ") and stuck in said for said in stalls)
    assert entry(job, "WorkerStalled")
    over = entry(job, "world 1 is over")
    assert all(words in over for words in ("and blames", "has kept others waiting for", stuck))
    assert "last seen in call_c_code" in entry(job, "did not come to the regroup within 2 s")


LIMIT = 400 << 20  # bytes: room for the slots, their workers and their spares
GROUPS = Path("/sys/fs/cgroup")


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
    job = Job(MemoryHog(box, bool(fault(lambda: True))), size=2, warm=False)
    with pytest.raises(OutOfMemory, match=r"out of memory 3 times .*spark\.executor\.memoryOverhead"):
        job.run()
