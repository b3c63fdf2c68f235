"""A job as its history sees it: a real driver machine, to which a test plays events by hand."""

from __future__ import annotations

from collections.abc import Sequence

from spark_elastic.monitoring.job_history import JobHistory
from spark_elastic.monitoring.report import JobReport, WorldChange
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import PublishWorld
from spark_elastic.protocol.messages import (
    DriverMessage,
    RegisterSlot,
    RequestNextWorld,
    WorkerDone,
    WorkerStarted,
    WorldFormed,
)
from spark_elastic.protocol.types import Limits, Phase, Position, SlotId, WorkerId, World
from spark_elastic.testing.fakes import FakeClock
from tests.simulator.stamping import stamp_event

STARTED = 100.0


class SimulatedJobClock(FakeClock):
    """The time of a played job."""

    def __init__(self, job: SimulatedJob) -> None:
        super().__init__()
        self._job = job

    def now(self) -> float:
        return STARTED + self._job.now


class SimulatedJob:
    """A driver machine whose transitions a job history observes; `now` is seconds since the launch."""

    def __init__(self, workers: int, all_results: bool = False) -> None:
        self.now = 0.0
        self.world_changes: list[WorldChange] = []
        self.history = JobHistory(SimulatedJobClock(self), self.world_changes.append)
        self.state, _ = driver_machine.initial(Limits(workers, 1, workers, all_results=all_results), 1)
        self.world: World | None = None

    def on(self, played: on.DriverEvent | DriverMessage) -> None:
        event = stamp_event(played, STARTED + self.now)
        self.state, commands = driver_machine.step(self.state, event)
        self.history.on_transition(event, commands, self.state)
        for command in commands:
            if isinstance(command, PublishWorld):
                self.world = command.world

    def start_worker(self, job: int) -> None:
        self.on(RegisterSlot(SlotId(f"{job}-0"), f"host-{job}", job))
        self.on(WorkerStarted(SlotId(f"{job}-0"), WorkerId(f"{job}-0.1")))
        self.on(RequestNextWorld(WorkerId(f"{job}-0.1"), None, None))

    def form(self) -> None:
        assert self.world is not None
        for member in self.world.members:
            self.on(WorldFormed(member.worker, self.world.fence))

    def start(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            self.start_worker(job)
        self.now += 1.0
        self.form()

    def lose_host(self, job: int, step: int, regroup: float) -> None:
        """The host of a member goes; the others come again at `step`."""
        assert self.world is not None
        (member,) = [member for member in self.world.members if member.slot == f"{job}-0"]
        for worker in (member.worker, None):
            self.on(on.ConnectionLost(0, member.slot, worker))
        self.on(on.HostLost(0, f"host-{job}", "Spark says so"))
        self.now += regroup
        self.leave_world(step, but=job)

    def leave_world(self, step: int, but: int = 0, planned: bool = False) -> None:
        """All members leave the world at `step`, but that of one slot job."""
        assert self.world is not None
        fence, position = self.world.fence, Position(0, Phase.TRAIN, step)
        for member in self.world.members:
            if member.slot != f"{but}-0":
                self.on(RequestNextWorld(member.worker, fence, position, planned=planned))

    def report(self, step: int, **more: float) -> None:
        metrics = {"epoch": 0, "epochs": 1, "step": step, "steps": 100, "rows": 10, "loss": 1.0, "world": 3}
        self.history.on_progress({**metrics, **more})

    def finish(self) -> None:
        assert self.world is not None
        for member in self.world.members:
            end = Position(1, Phase.TRAIN, 0)
            self.on(WorkerDone(member.worker, self.world.fence, end, "null"))

    @property
    def result(self) -> JobReport:
        return self.history.build_report()
