"""A job as its history sees it: a real driver machine, to which a test plays events by hand."""

from __future__ import annotations

from collections.abc import Sequence

from spark_elastic.monitoring.job_history import JobHistory
from spark_elastic.monitoring.report import JobReport, WorldChange
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import DriverCommand
from spark_elastic.protocol.messages import DriverMessage, WorkerDone
from spark_elastic.protocol.types import Limits, Phase, Position
from spark_elastic.testing.fakes import FakeClock
from tests.simulator.invariants import stamp_event
from tests.unit.protocol.driver_bench import Bench, at, name


class SimulatedJobClock(FakeClock):
    """The time of a played job."""

    def __init__(self, job: SimulatedJob) -> None:
        super().__init__()
        self._job = job

    def now(self) -> float:
        return self._job.now


class SimulatedJob(Bench):
    """A driver machine whose transitions a job history observes; `now` is seconds since the launch."""

    def __init__(self, workers: int, all_results: bool = False) -> None:
        super().__init__(Limits(workers, 1, workers, all_results=all_results))
        self.world_changes: list[WorldChange] = []
        self.history = JobHistory(SimulatedJobClock(self), self.world_changes.append)

    def on(self, played: on.DriverEvent | DriverMessage) -> tuple[DriverCommand, ...]:
        commands = super().on(played)
        self.history.on_transition(stamp_event(played, self.now), commands, self.state)
        return commands

    @classmethod
    def training(cls, workers: int, all_results: bool = False) -> SimulatedJob:
        """With a world of so many, which stands after a second."""
        job = cls(workers, all_results)
        job.begin(range(1, workers + 1))
        return job

    def start_worker(self, job: int) -> None:
        self.slot(job, f"host-{job}")
        self.join(name(job))

    def begin(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            self.start_worker(job)
        self.now += 1.0
        self.form()

    def lose_host(self, job: int, step: int, regroup: float) -> None:
        """The host of a member goes; the others come again at `step`."""
        (member,) = [member for member in self.world.members if member.slot == f"{job}-0"]
        for worker in (member.worker, None):
            self.on(on.ConnectionLost(0, member.slot, worker))
        self.on(on.HostLost(0, f"host-{job}", "Spark says so"))
        self.now += regroup
        self.leave_world(step, but=job)

    def move_alone(self, job: int) -> None:
        """The host of the only worker goes, before a step, and the next slot job takes over."""
        self.lose_host(job, step=0, regroup=0.0)
        self.on(on.LaunchEnded(0, job, "its host is lost"))
        self.start_worker(job + 1)
        self.form()

    def leave_world(self, step: int, but: int = 0, planned: bool = False) -> None:
        """All members leave the world at `step`, but that of one slot job."""
        world = self.world
        for member in world.members:
            if member.slot != f"{but}-0":
                self.join(member.worker, world.fence, at(step), planned=planned)

    def report(self, step: int, **more: float) -> None:
        metrics = {"epoch": 0, "epochs": 1, "step": step, "steps": 100, "rows": 10, "loss": 1.0, "world": 3}
        self.history.on_progress({**metrics, **more})

    def finish(self) -> None:
        for member in self.world.members:
            self.on(WorkerDone(member.worker, self.fence, Position(1, Phase.TRAIN, 0), "null"))

    @property
    def result(self) -> JobReport:
        return self.history.build_report()
