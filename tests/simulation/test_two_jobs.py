"""Two jobs of one queue over the cores of one small cluster: real driver machines and real turns (R17)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from spark_elastic.driver.gang_scheduler import GangScheduler, JobQueue
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import AbortWorld, End, JobOutcome, LaunchSlot, PublishWorld, ReleaseSlot
from spark_elastic.protocol.messages import (
    DriverMessage,
    Heartbeat,
    RegisterSlot,
    RequestNextWorld,
    WorkerStarted,
)
from spark_elastic.protocol.types import Limits, SlotId, WorkerId
from spark_elastic.testing.fakes import FakeClock
from tests.unit.protocol.driver_bench import Bench, at

LIMITS = Limits(3, 3, 3, gather_timeout=5.0, start_timeout=120.0)
TICK = 0.5


@dataclass
class Cores:
    """Whose slot jobs run and which wait, first come, first served."""

    free: int
    queue: deque[tuple[Job, int]] = field(default_factory=deque)

    def start(self) -> None:
        while self.free and self.queue:
            job, number = self.queue.popleft()
            self.free -= 1
            job.start_slot(number)


class Job(Bench):
    """Its slots come up at once, and its workers come back from a broken world at the step that is `step`."""

    def __init__(self, cores: Cores, queue: JobQueue, name: str, clock: FakeClock) -> None:
        super().__init__(LIMITS)
        self.cores, self.clock, self.step = cores, clock, 7
        self.running: set[int] = set()
        self.late = ""  # the slot of a member that does not come back from its world
        self._lacked = False
        self.scheduler = GangScheduler(queue, name, LIMITS, clock)
        self.scheduler.alive_lock.acquire()
        self.scheduler.__enter__()
        self._looked = clock.now()
        self._execute_commands()

    def post(self, played: on.DriverEvent | DriverMessage) -> None:
        self.now = self.clock.now()
        self.on(played)
        if self.state.lacks_slots != self._lacked:
            self._lacked = self.state.lacks_slots
            self.scheduler.report_shortage(self._lacked)
        self._execute_commands()

    def _execute_commands(self) -> None:
        for command in self.commands:
            match command:
                case LaunchSlot(_, number):
                    self.cores.queue.append((self, number))
                case ReleaseSlot(_, slot):
                    self._end_slot(int(slot.partition("-")[0]))
                case PublishWorld():
                    self.scheduler.finish_gathering()
                    self.form()
                case AbortWorld():
                    for member in self.world.members:
                        if member.worker in self.state.workers and member.slot != self.late:
                            self.post(RequestNextWorld(member.worker, self.fence, at(self.step)))
                case End():
                    self.scheduler.alive_lock.release()

    def start_slot(self, number: int) -> None:
        self.running.add(number)
        worker = WorkerId(f"{number}-0.1")
        self.post(RegisterSlot(worker.slot, f"h{number}", number))
        self.post(WorkerStarted(worker.slot, worker))
        self.post(RequestNextWorld(worker, None, None))

    def _end_slot(self, number: int) -> None:
        if number in self.running:
            self.running.discard(number)
            self.cores.free += 1
            self.post(on.LaunchEnded(0, number, "released"))

    def lose_slot(self, number: int) -> None:
        """Slot and core."""
        self.running.discard(number)
        self.post(on.LaunchEnded(0, number, "executor lost", executor_lost=True))

    def tick(self) -> None:
        for number in sorted(self.running):
            self.post(Heartbeat(SlotId(f"{number}-0"), WorkerId(f"{number}-0.1"), "S"))
        self.post(on.Tick(0))
        if self.clock.now() - self._looked >= LIMITS.gather_timeout:
            self._looked = self.clock.now()
            wanted = self.scheduler.find_slot_claim()
            if wanted is not None:
                self.post(on.SlotsWanted(0, *wanted))


def _pass(seconds: float, clock: FakeClock, cores: Cores, *jobs: Job) -> None:
    end = clock.now() + seconds
    while clock.now() < end:
        clock.advance(TICK)
        for job in jobs:
            job.tick()
        cores.start()


def _start_two_jobs() -> tuple[FakeClock, Cores, Job, Job]:
    """On all the cores there are."""
    queue, clock, cores = JobQueue(), FakeClock(), Cores(free=6)
    first = Job(cores, queue, "first", clock)
    cores.start()
    second = Job(cores, queue, "second", clock)
    cores.start()
    return clock, cores, first, second


def test_r17_after_a_loss_that_leaves_two_jobs_short_the_first_continues_and_then_the_second() -> None:
    clock, cores, first, second = _start_two_jobs()
    assert first.world.size == second.world.size == 3
    first.lose_slot(1)
    second.lose_slot(1)  # the same host
    _pass(30.0, clock, cores, first, second)
    assert (len(first.find_commands(PublishWorld)), first.world.size, first.world.position) == (2, 3, at(7))
    assert len(second.find_commands(PublishWorld)) == 1
    _pass(2 * LIMITS.start_timeout, clock, cores, first, second)
    assert not second.find_commands(End), "the slots are taken, not missing"
    first.post(on.CancelRequested(0, "it is done"))
    _pass(40.0, clock, cores, second)
    assert (len(second.find_commands(PublishWorld)), second.world.size) == (2, 3)
    assert second.world.position == at(7)


def test_r17_a_first_job_that_can_never_continue_ends_with_a_sentence_and_the_second_continues() -> None:
    clock, cores, first, second = _start_two_jobs()
    for number in (1, 2):
        first.lose_slot(number)
    second.lose_slot(1)
    _pass(LIMITS.start_timeout - 10.0, clock, cores, first, second)
    assert len(first.running) == 2
    assert len(second.running) == 1
    _pass(60.0, clock, cores, first, second)
    assert first.end.outcome is JobOutcome.NOT_ENOUGH_WORKERS
    assert (len(second.find_commands(PublishWorld)), second.world.position) == (2, at(7))


def test_r17_a_job_keeps_its_slots_while_the_first_only_waits_for_a_late_member() -> None:
    clock, cores, first, second = _start_two_jobs()
    first.late = "1-0"
    member = next(member for member in first.world.members if member.slot != first.late)
    first.post(RequestNextWorld(member.worker, first.fence, at(7), reason="its peer is silent"))
    second.lose_slot(1)
    _pass(3 * LIMITS.gather_timeout, clock, cores, first, second)
    assert len(first.find_commands(PublishWorld)) == 1
    assert first.state.workers.not_left == 1
    assert not second.find_commands(ReleaseSlot), "its survivors stay warm for a new host"
