"""Simulated hosts, slot tasks and training processes. Each process runs the real worker machine.

What they do happens at simulated times; a stopped process freezes what is due until it is continued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import worker_machine
from spark_elastic.protocol.messages import (
    CheckpointWritten,
    Heartbeat,
    RegisterSlot,
    WorkerExited,
    WorkerStarted,
)
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    MAX_HEARTBEAT_INTERVAL,
    STOPPED,
    Fence,
    Position,
    SlotId,
    WorkerId,
    World,
    heartbeat_interval,
)
from spark_elastic.protocol.worker_machine import WorkerStage
from spark_elastic.worker.slot_agent import CHECK_EVERY, REPORT_WAITS
from tests.simulator.fault_plan import Moment
from tests.simulator.invariants import Violation

if TYPE_CHECKING:
    from tests.simulator.group import SimGroup
    from tests.simulator.server import SimServer
    from tests.simulator.simulation import Simulation


REPEAT = 3.0  # seconds after which an unanswered question is asked again
# Steps applied, and a hash of all of them in order: a step that is lost, doubled or out of order shows.
Weights = tuple[int, int]
INITIAL_WEIGHTS: Weights = (0, 0)


class SimCheckpointer:
    """As `training.checkpointing` and its writer: rank 0 copies its state after a step that is due. Once the step is
    sealed, under R1 (finalized steps), it writes the copy, one at a time, and reports it to the driver."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._steps = 0
        self._copied: tuple[Position, Weights] | None = None
        self._waiting: tuple[Fence, Position, Weights] | None = None
        self._writing = False

    def copy_if_due(self) -> None:
        every = self._worker.sim.plan.checkpoint_every
        if every is None or self._worker.rank != 0:
            return
        self._steps += 1
        if self._steps >= every:
            self._steps = 0
            self._copied = self._worker.position, self._worker.weights

    def write_copied(self, fence: Fence) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            self._waiting = (fence, *copied)
            self._write()

    def discard_copied(self) -> None:
        self._copied = None

    def _write(self) -> None:
        if self._writing or self._waiting is None:
            return
        job, self._waiting, self._writing = self._waiting, None, True
        seconds = self._worker.sim.rng.uniform(0.005, 0.2)
        self._worker.act_later(seconds / 2, partial(self._write_half, *job))
        self._worker.act_later(seconds, partial(self._finish_write, *job))

    def _write_half(self, fence: Fence, position: Position, weights: Weights) -> None:
        self._worker.sim.run.write_half(fence, position)
        self._worker.sim.moment(Moment.WRITING)

    def _finish_write(self, fence: Fence, position: Position, weights: Weights) -> None:
        checkpoint = self._worker.sim.run.write(fence, position, weights)
        slot = self._worker.slot
        slot.server.receive(slot, CheckpointWritten(self._worker.name, checkpoint))
        self._writing = False
        self._worker.sim.moment(Moment.WRITTEN)
        self._write()


@dataclass
class SimHost:
    """An executor's machine."""

    name: str
    number: int
    capacity: int  # slots that it takes
    living: int = 0  # slots that are alive
    alive: bool = True
    cut: bool = False  # off the driver
    healed: float = 0.0  # when it was last cut off no more
    slowness: float = 1.0  # factor on the time that a step takes
    slots: list[SimSlot] = field(default_factory=list)  # all that it ever had
    pending: list[Callable[[], None]] = field(default_factory=list)  # messages that it sends once it is back

    def count_room(self) -> int:
        return self.capacity - self.living if self.alive else 0


class SimSlot:
    """One attempt of a slot task with its training process."""

    def __init__(self, sim: Simulation, server: SimServer, name: SlotId, launch: int, host: SimHost) -> None:
        self.sim, self.name, self.launch, self.host = sim, name, launch, host
        self.server = server
        self.alive = True
        self.started = 0
        self.is_silent = False  # it sends no heartbeats
        self.worker: SimWorker | None = None
        host.slots.append(self)
        host.living += 1
        server.receive(self, RegisterSlot(name, host.name, launch), 0.001)
        sim.schedule(0.005, self.start_worker)
        sim.schedule(self._heartbeat_interval(), self.send_heartbeat)

    def _heartbeat_interval(self) -> float:
        return heartbeat_interval(self.sim.plan.limits.lease, len(self.server.state.slots))

    def start_worker(self) -> None:
        if not self.alive or self.server.over:
            return
        self.started += 1
        self.worker = SimWorker(self.sim, WorkerId.build(self.name, self.started), self)
        self.server.receive(self, WorkerStarted(self.name, self.worker.name))

    def report_stop(self) -> None:
        """As slots of small jobs do, which look at their worker often."""
        worker, small = self.worker, self._heartbeat_interval() <= MAX_HEARTBEAT_INTERVAL
        if worker is not None and worker.alive and worker.stopped and small:
            self.send_heartbeat(again=False)
            self.sim.schedule(CHECK_EVERY, self.report_stop)

    def report_wait(self, since: float) -> None:
        """Likewise, of a worker that has waited since then."""
        worker, last = self.worker, REPORT_WAITS[1]
        if (
            worker is not None
            and worker.alive
            and worker.waits_since == since
            and self.sim.now - since < last
        ):
            self.send_heartbeat(again=False)
            self.sim.schedule(CHECK_EVERY, lambda: self.report_wait(since))

    def send_heartbeat(self, again: bool = True) -> None:
        if self.alive and not self.is_silent:
            worker = self.worker
            state = "" if worker is None or not worker.alive else STOPPED if worker.stopped else "S"
            since = None if worker is None else worker.waits_since
            waited = 0.0 if since is None else self.sim.now - since
            name = worker.name if worker is not None else ""
            did = since is not None, waited, "", self.sim.plan.bitwise
            self.server.receive(self, Heartbeat(self.name, name, state, *did))
            if again:
                self.sim.schedule(self._heartbeat_interval(), self.send_heartbeat)

    def report_exit(self, worker: SimWorker, code: int) -> None:
        """Its child ended: report it, and start another in its place."""
        if self.alive and worker is self.worker:
            self.server.receive(self, WorkerExited(self.name, worker.name, code))
            self.sim.schedule(0.01, self.start_worker)

    def leave(self) -> None:
        self.alive = False
        self.host.living -= 1
        self.sim.offer_host(self.host)

    def end(self, reason: str, failed: bool = False) -> None:
        """The slot task is gone, and its child with it. failed: it did not return."""
        if self.alive:
            self.leave()
            if self.worker is not None:
                self.worker.die(-9, quiet=True)
            self.sim.end_attempt(self, reason, failed)


class SimWorker:
    """A training process: it carries out the real machine's commands in simulated time."""

    def __init__(self, sim: Simulation, name: WorkerId, slot: SimSlot) -> None:
        self.sim, self.name, self.slot = sim, name, slot
        self.alive, self.stopped, self.connected = True, False, False
        self.state = worker_machine.WorkerState(name)
        self.weights = INITIAL_WEIGHTS
        self.version = INITIAL_VERSION  # the newest membership version that it received
        self.group: SimGroup | None = None
        self.question: Callable[[], None] | None = None
        self.checkpointer = SimCheckpointer(self)
        self.raises = ""  # fingerprint of what user code raises next
        self.woke = sim.now
        self.waits_since: float | None = None  # for others; None: it works
        self._frozen: list[Callable[[], None]] = []
        sim.moment(Moment.WARMING)
        before_loop = sim.plan.before_loop if sim.server.worlds else 0.0
        self.act_later(sim.rng.uniform(0.02, 0.4) + before_loop, lambda: self.handle(on.Warm(sim.now)))

    @property
    def position(self) -> Position:
        assert self.state.position is not None
        return self.state.position

    @property
    def rank(self) -> int | None:
        member = self.group.world.member(self.name) if self.group is not None else None
        return None if member is None else member.rank

    @property
    def reachable_since(self) -> float:
        """Since when it runs and can receive the driver's messages."""
        never = self.stopped or self.slot.host.cut
        return self.sim.now if never else max(self.woke, self.slot.host.healed)

    def is_training_before(self, fence: Fence) -> bool:
        """Whether it is in an older world and does not wait for the next."""
        busy = self.state.stage in (WorkerStage.FORMING, WorkerStage.SYNCING, WorkerStage.RUNNING)
        return self.alive and busy and self.group is not None and self.group.world.fence < fence

    # ---- time

    def act_later(self, delay: float, act: Callable[[], None]) -> None:
        """Act after the delay if the process is alive; if it is stopped by then, once it is continued."""
        self.sim.schedule(delay, lambda: self._act_or_freeze(act))

    def _act_or_freeze(self, act: Callable[[], None]) -> None:
        if self.stopped and self.alive:
            self._frozen.append(act)
        elif self.alive:
            act()

    def stop(self) -> None:
        self.stopped = True
        self.sim.schedule(CHECK_EVERY, self.slot.report_stop)

    def resume(self) -> None:
        self.stopped = False
        self.woke = self.sim.now
        frozen, self._frozen = self._frozen, []
        for act in frozen:
            self._act_or_freeze(act)

    def die(self, code: int, quiet: bool = False) -> None:
        """The process ends. quiet: no slot is left that reports the exit."""
        if not self.alive:
            return
        self.alive = False
        if self.group is not None:
            self.group.close(self)
        self.slot.server.close_connection(self)
        if not quiet:
            self.sim.schedule(self.sim.rng.uniform(0.003, 0.02), lambda: self.slot.report_exit(self, code))

    # ---- the machine

    def handle(self, event: on.WorkerEvent) -> None:
        """Ask the machine and carry out what it says."""
        if not self.alive:
            return
        self.state, commands = self.sim.worker_step(self.state, event)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: do.WorkerCommand) -> None:
        match command:
            case do.Ask(_, message):
                self.ask(lambda: self.slot.server.receive_question(self, message))
            case do.Report(_, message):
                self.slot.server.receive(self.slot, message, 0.002)
            case do.Form():
                self.question = None
                if self.group is not None:
                    raise Violation(f"{self.name} forms a group while its last one is open")
                self.group = self.sim.group(self.slot.server.find_world(command.world.fence))
                self.group.form(self)
            case do.Sync():
                if self.group is not None:
                    self.group.sync(self)
            case do.Run():
                self.train()
            case do.AbortGroup(reason):
                if self.group is not None:
                    self.group.abort(self, reason)
            case do.CloseGroup():
                if self.group is not None:
                    self.group.close(self)
                    self.group = None
            case do.Exit(_, code):
                self.sim.schedule(0.003, lambda: self.die(code))

    def ask(self, question: Callable[[], None]) -> None:
        """A request that stays open until answered, and is repeated."""
        self.connected = True
        if question is not self.question:
            self.waits_since = since = self.sim.now
            if self.sim.plan.bitwise:
                self.sim.schedule(REPORT_WAITS[0], lambda: self.slot.report_wait(since))
        self.question = question
        question()
        self.act_later(REPEAT, lambda: self.ask(question) if self.question is question else None)

    # ---- the program

    def train(self) -> None:
        if self.group is None or not self.alive:
            return
        fingerprint = self.raises or self.sim.faults.find_exception(self)
        if fingerprint:
            self.raises = ""
            text = f"ValueError: {fingerprint}"
            self.act_later(0.01, lambda: self.handle(on.UserRaised(self.sim.now, fingerprint, text)))
        else:
            self.group.forward(self)

    def apply(self, world: World) -> None:
        """One step, whole."""
        position = self.position
        self.checkpointer.write_copied(world.fence)
        self.sim.record_applied(self, world, position)
        self.weights = (self.weights[0] + 1, hash((self.weights[1], position.epoch, position.step)))
        self.handle(on.Applied(self.sim.now, world.fence, self.sim.plan.find_next_position(position)))
        self.checkpointer.copy_if_due()

    def finish(self, world: World) -> None:
        result = f"{self.weights[0]}:{self.weights[1]}"
        seconds = self.sim.jitter(0.02)
        self.act_later(seconds, lambda: self.handle(on.Finished(self.sim.now, world.fence, result)))
        self.sim.moment(Moment.CLOSING)
