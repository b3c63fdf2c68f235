"""Plays events to the driver machine by hand: workers named by slot job ("1-0.1" is the first worker of job 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages as said
from spark_elastic.protocol.driver.forming import assign_ranks, find_source
from spark_elastic.protocol.driver.state import DriverState, WorkerRecord
from spark_elastic.protocol.types import Fence, Limits, Phase, Position, SlotId, WorkerId, World
from tests.simulator.invariants import DriverInvariants, stamp_event

C = TypeVar("C", bound=do.DriverCommand)
FOUR = Limits(num_workers=4, min_workers=1, max_workers=4)


def at(step: int) -> Position:
    return Position(0, Phase.TRAIN, step)


def _take_step(position: Position) -> Position:
    return replace(position, step=position.step + 1)


def name(job: int, started: int = 1) -> WorkerId:
    return WorkerId(f"{job}-0.{started}")


class Bench:
    """A driver machine, the time, and what it commanded so far. Invariants are checked after every event."""

    def __init__(self, limits: Limits = FOUR, **changes: Any) -> None:
        self.now = 0.0
        self.limits = limits = replace(limits, **changes)
        self.invariants = DriverInvariants(_take_step)
        self.state: DriverState
        self.state, self.commands = driver_machine.initial(limits, 1)
        self.invariants.check(self.state, None, self.state, self.commands)
        self.log = list(self.commands)

    @classmethod
    def running(cls, *jobs: int, limits: Limits = FOUR, **changes: Any) -> Bench:
        """With a world of these jobs' workers."""
        bench = cls(limits, **changes)
        bench.start(*jobs)
        return bench

    def on(self, played: on.DriverEvent | said.DriverMessage) -> tuple[do.DriverCommand, ...]:
        event = stamp_event(played, self.now)
        before = self.state
        self.state, self.commands = driver_machine.step(before, event)
        self.invariants.check(before, event, self.state, self.commands)
        self.log.extend(self.commands)
        return self.commands

    def wait(self, seconds: float, heartbeats_of: Sequence[int | str] = ()) -> None:
        """Let time pass in ticks; these slots, or the first ones of these launches, send heartbeats every 0.25 s."""
        end, beat = self.now + seconds, self.now
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.05)
            if self.now > beat:
                beat = self.now + 0.2
                for job in heartbeats_of:
                    slot = self.state.slots.get(f"{job}-0" if isinstance(job, int) else job)
                    if slot is not None:
                        self.on(said.Heartbeat(slot.slot, slot.worker, "S"))
            self.on(on.Tick(0))

    def find_commands(self, kind: type[C]) -> list[C]:
        return [command for command in self.log if isinstance(command, kind)]

    @property
    def released(self) -> list[SlotId]:
        return [release.slot for release in self.find_commands(do.ReleaseSlot)]

    @property
    def world(self) -> World:
        return self.find_commands(do.PublishWorld)[-1].world

    @property
    def fence(self) -> Fence:
        return self.world.fence

    @property
    def end(self) -> do.End:
        return self.find_commands(do.End)[-1]

    def check_end(self, outcome: do.JobOutcome, *said: str) -> None:
        """The job has ended so, with these words in its reason."""
        assert self.end.outcome is outcome
        assert all(words in self.end.reason for words in said), self.end.reason

    # ---- what usually happens

    def slot(self, job: int, host: str = "") -> None:
        self.on(said.RegisterSlot(SlotId(f"{job}-0"), host or f"h{job}", job))
        self.on(said.WorkerStarted(SlotId(f"{job}-0"), name(job)))

    def copy(self, job: int, host: str = "h9") -> None:
        """Another attempt of that slot's task comes up on that host, with a warm worker."""
        self.on(said.RegisterSlot(SlotId(f"{job}-1"), host, job))
        self.join(WorkerId(f"{job}-1.1"))

    def start_warm(self, *jobs: int) -> None:
        """Slots come up and their workers get warm."""
        for job in jobs:
            self.slot(job)
            self.join(name(job))

    def join(
        self, worker: str, fence: Fence | None = None, position: Position | None = None, **more: object
    ) -> None:
        self.on(said.RequestNextWorld(worker, fence, position, **more))  # type: ignore[arg-type]

    def exit(self, worker: WorkerId, code: int, *reason: str, **more: Any) -> None:
        """The worker's process ends."""
        self.on(said.WorkerExited(worker.slot, worker, code, *reason, **more))

    def restart(self, worker: WorkerId) -> None:
        """The slot's next worker comes and gets warm."""
        self.on(said.WorkerStarted(worker.slot, worker))
        self.join(worker)

    def form(self) -> None:
        for member in self.world.members:
            self.on(said.WorldFormed(member.worker, self.fence))

    def start(self, *jobs: int) -> None:
        """A world that runs."""
        self.start_warm(*jobs)
        if not self.find_commands(do.PublishWorld):
            self.wait(self.limits.gather_timeout, heartbeats_of=jobs)
        self.form()

    def regroup(self, step: int, *workers: str) -> None:
        """These come back from a broken world at that step."""
        for worker in workers:
            self.join(worker, self.fence, at(step))

    def stop_planned(self, step: int, *workers: str) -> None:
        assert self.find_commands(do.AnnounceChange)
        fence = self.fence
        for worker in workers:
            self.join(worker, fence, at(step), planned=True)

    def change_world(self, step: int) -> None:
        """A change is announced, and all members stop for it at that step."""
        self.wait(0.5, heartbeats_of=list(self.state.slots))
        self.stop_planned(step, *self.members())

    def members(self) -> list[str]:
        return [member.worker for member in self.world.members]


def make_world(generation: int, positions: Mapping[str, Position | None], **more: Any) -> World:
    """A world of these workers on one host, in order of rank."""
    workers = [WorkerRecord(name, f"slot {name}", "h", 0.0, position=p) for name, p in positions.items()]
    source = 0 if more.get("resume") else find_source(workers)
    members = assign_ranks(workers, dict.fromkeys(positions, "h"))
    return World(Fence(1, generation), members, source, "because", **more)
