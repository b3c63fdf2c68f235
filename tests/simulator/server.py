"""The simulated rendezvous: the network between hosts and driver, and the driver machine with its invariants.

Messages are delayed, reordered, duplicated and repeated long after; those of a host that is cut off arrive once it is
back. The server answers as the real one does: from what was published, if that answers the question, else from the
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.clock import RunningClock
from spark_elastic.errors import JobCancelled
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.driver.state import DriverState
from spark_elastic.protocol.messages import DriverMessage, Heartbeat, RequestNextWorld, WorkerDone
from spark_elastic.protocol.types import INITIAL_VERSION, Fence, MembershipVersion, WorkerId, World
from spark_elastic.runs.checkpoint import CheckpointList, OwnedRun
from spark_elastic.testing import FakeClock
from tests.simulator.fault_plan import Moment
from tests.simulator.invariants import DriverInvariants, EventLog, Violation, stamp_event
from tests.specification import Specification

if TYPE_CHECKING:
    from tests.simulator.hosts import SimHost, SimSlot, SimWorker
    from tests.simulator.simulation import Simulation

TICK = 0.05
LATEST_FACTOR = 2000  # a late copy comes after 0.01 s, or after up to so many times as long
PUBLISHING = 0.02  # seconds from the machine's command to the list in the store; commands stay in order
ABORT_TIMEOUT = 0.5  # seconds after an abort, by which no reachable worker waits in that world any more
Step = Callable[[DriverState, on.DriverEvent], tuple[DriverState, tuple[do.DriverCommand, ...]]]


class DriverClock(FakeClock):
    """Of the driver's machine: it may run too quickly or too slowly, and jump."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__()
        self._sim = sim

    def now(self) -> float:
        now = self._sim.now * self._sim.plan.driver_clock
        seconds, at = self._sim.plan.driver_jump
        return now + seconds if now > at else now


class SimServer:
    """The driver's process: it receives messages, runs the machine and carries out its commands."""

    def __init__(self, sim: Simulation, driver_step: Step, held: OwnedRun, event_log: EventLog) -> None:
        self.sim = sim
        self.step = driver_step
        self.run = held
        self.invariants = DriverInvariants(sim.plan.find_next_position, event_log)
        self.event_log = event_log
        self.clock = RunningClock(DriverClock(sim))
        self.dead = False  # its process ended: messages to it are lost
        self.end: do.End | None = None
        self.worlds: list[World] = []
        self.aborted: dict[Fence, str] = {}
        self.held: dict[str, tuple[SimWorker, Fence | None]] = {}
        self.stops: dict[str, do.StopWorker] = {}
        self.version = INITIAL_VERSION
        self._loses_answers = False  # of the message that is delivered now

    @property
    def over(self) -> bool:
        return self.dead or self.end is not None

    def open(self) -> None:
        begun = self.sim.plan.limits, self.run.attempt, self.run.checkpoints
        self.state, commands = driver_machine.initial(*begun)
        self.invariants.check(self.state, None, self.state, commands)
        self.rules = Specification(*begun)
        self._carry_out(commands)
        self._tick()

    def _tick(self) -> None:
        self.post(on.Tick(self.sim.now))
        if not self.over:
            self.sim.schedule(TICK, self._tick)

    def post(self, played: on.DriverEvent | DriverMessage) -> None:
        """Give the event to the machine, or the message as received now."""
        if self.dead:
            return
        event = stamp_event(played, self.clock.now())
        before = self.state
        self.state, commands = self.step(before, event)
        self.invariants.check(before, event, self.state, commands)
        self.rules.read(event, commands)
        self._carry_out(commands)

    def _carry_out(self, commands: tuple[do.DriverCommand, ...]) -> None:
        for command in commands:
            match command:
                case do.LaunchSlot(_, launch):
                    self.sim.launch(self, launch)
                case do.PublishWorld(_, world):
                    self._publish(world)
                case do.AbortWorld(reason, fence):
                    self.aborted[fence] = reason
                    self.sim.moment(Moment.REGROUPING)
                    for worker in self._workers():
                        self._send_to_worker(worker, partial(self._abort, worker, fence, reason))
                    self.sim.schedule(ABORT_TIMEOUT, partial(self._check_no_waiters, fence))
                case do.AnnounceChange(_, version):
                    self.version = version
                    for worker in self._workers():
                        self._send_to_worker(worker, partial(self._receive_version, worker, version))
                case do.StopWorker():
                    self._stop(command)
                case do.ReleaseSlot(reason, slot):
                    self._release(slot, reason)
                case do.PublishCheckpoint(_, kept):
                    self.sim.schedule(PUBLISHING, partial(self._publish_checkpoint, kept))
                case do.End():
                    self.end = command

    def find_world(self, fence: Fence) -> World:
        return next(world for world in reversed(self.worlds) if world.fence == fence)

    def _workers(self) -> list[SimWorker]:
        return [worker for worker in self.sim.workers() if worker.slot.server is self]

    # ---- messages

    def receive(self, slot: SimSlot, message: DriverMessage, most: float = 0.01) -> None:
        """The slot or its worker sends it. A lost heartbeat is not repeated."""
        if not (isinstance(message, Heartbeat) and slot.host.cut):
            self._send(slot.host, lambda: self.post(message), most)

    def receive_question(self, worker: SimWorker, asked: RequestNextWorld | WorkerDone) -> None:
        if isinstance(asked, RequestNextWorld) and asked.suspected_ranks and asked.fence is not None:
            members = self.find_world(asked.fence).members
            asked = replace(asked, suspects=tuple(members[rank].worker for rank in asked.suspected_ranks))
        self._send(worker.slot.host, lambda: self._receive_question(worker, asked))

    def _receive_question(self, worker: SimWorker, message: RequestNextWorld | WorkerDone) -> None:
        fence = message.fence
        if self.dead:
            return
        if not self._loses_answers:
            self.held[worker.name] = (worker, fence)
        is_answered = self._find_answer(worker.name, fence) is not None
        if not is_answered:
            self.post(message)
        elif not self._loses_answers:
            self._answer(worker.name)

    def _find_answer(self, name: str, fence: Fence | None) -> on.WorkerEvent | None:
        stop = self.stops.get(name)
        view = self.worlds[-1].view_of(WorkerId(name)) if self.worlds else None
        if stop is not None:
            return on.StopReceived(0, stop.reason)
        if view is not None and (fence is None or fence < view.fence):
            return on.WorldReceived(0, view)
        return None

    def _answer(self, name: str) -> bool:
        """Answer a question that waits, if there is an answer. Returns whether there was."""
        worker, fence = self.held[name]
        event = self._find_answer(name, fence)
        if event is None:
            return False
        del self.held[name]
        self._send_to_worker(worker, lambda: self._deliver_answer(worker, event))
        return True

    def _deliver_answer(self, worker: SimWorker, event: on.WorkerEvent) -> None:
        worker.handle(replace(event, now=self.sim.now))
        self.send_missed(worker)

    # ---- connections

    def close_connection(self, worker: SimWorker) -> None:
        """The process is gone: the server sees its connection end, unless the host is cut off."""
        if worker.connected and not worker.slot.host.cut and not self.sim.silent:
            self.sim.schedule(0.001, lambda: self.post(on.ConnectionLost(0, worker.slot.name, worker.name)))

    def lose_connection(self, slot: SimSlot, failed: bool = False) -> None:
        if not self.sim.silent:
            event = on.ConnectionLost(0, slot.name, reset=failed)
            self.sim.schedule(self.sim.rng.uniform(0, 0.01), lambda: self.post(event))

    def cut_connections(self, slot: SimSlot) -> None:
        self.lose_connection(slot, failed=True)
        worker = slot.worker
        if worker is not None and worker.alive and worker.connected and not self.sim.silent:
            event = on.ConnectionLost(0, slot.name, worker.name, reset=True)
            self.sim.schedule(self.sim.rng.uniform(0, 0.01), lambda: self.post(event))

    def heal(self, slot: SimSlot) -> None:
        """Slot and worker ask again, and receive what they have missed."""
        worker = slot.worker
        self._send(slot.host, lambda: self.post(on.ConnectionBack(0, slot.name)))
        if worker is not None and worker.alive and worker.connected:
            self._send(slot.host, lambda: self.post(on.ConnectionBack(0, slot.name, worker.name)))
            if worker.question is not None:
                worker.act_later(self.sim.rng.uniform(0, 0.2), lambda: worker.question and worker.question())
            self.send_missed(worker)
        order = self.stops.get(worker.name) if worker is not None else None
        if order is not None:
            self._stop(order)
        if slot.name in self.sim.released:
            self._release(slot.name, self.sim.released[slot.name])

    def send_missed(self, worker: SimWorker) -> None:
        """The worker's long poll: is its world over, is there a newer version, shall it stop?"""
        if worker.state.fence in self.aborted:
            fence = worker.state.fence
            self._send_to_worker(worker, lambda: self._abort(worker, fence, self.aborted[fence]))
        self._send_to_worker(worker, partial(self._receive_version, worker, self.version))

    def _send(self, host: SimHost, act: Callable[[], None], most: float = 0.01) -> None:
        """host -> driver; kept while the host is cut off."""
        if host.cut:
            host.pending.append(lambda: self._send(host, act, most))
            return
        for _ in range(1 + (self.sim.rng.random() < self.sim.plan.duplicates)):
            self.sim.schedule(self.sim.rng.uniform(0.0002, most), act)
        if self.sim.plan.late_copies and self.sim.rng.random() < self.sim.plan.late_copies:
            self.sim.schedule(0.01 * LATEST_FACTOR ** self.sim.rng.random(), partial(self._deliver_late, act))

    def _deliver_late(self, act: Callable[[], None]) -> None:
        """The connection is gone, on which the message's answer would go."""
        if not self.over:
            self._loses_answers = True
            act()
            self._loses_answers = False

    def _send_to_worker(self, worker: SimWorker, act: Callable[[], None]) -> None:
        """driver -> worker; lost where the host is cut off."""
        delay = self.sim.rng.uniform(0.0002, 0.01)
        worker.act_later(delay, lambda: None if worker.slot.host.cut or self.dead else act())

    # ---- commands of the machine

    def _publish(self, world: World) -> None:
        if len(self.worlds) > 500:
            raise Violation(f"500 worlds and no end\n{self.event_log.text()}")
        self.worlds.append(world)
        if world.resume or world.source is None:
            training = [w.name for w in self._workers() if self._is_training_in_parallel(w, world)]
            self.sim.run.checkpoint_invariants.check_begin(world, training)
        for member in world.members:
            if member.worker in self.held:
                self._answer(member.worker)

    def _is_training_in_parallel(self, worker: SimWorker, world: World) -> bool:
        """Whether its older world may still take a step. A step needs all members, so none may be in a later world."""
        if not worker.is_training_before(world.fence) or worker.group is None:
            return False
        its = worker.group.world
        later = [world for world in self.worlds if its.fence < world.fence]
        gone_on = {member.worker for world in later for member in world.members}
        return not gone_on & {member.worker for member in its.members}

    def _publish_checkpoint(self, kept: CheckpointList) -> None:
        if self.dead:
            return
        try:
            self.run.publish_now(kept)
        except JobCancelled as taken:
            self.post(on.CancelRequested(0, str(taken)))
            return
        self.sim.run.checkpoint_invariants.record_acknowledged(self.run.attempt, kept)
        self.sim.moment(Moment.PUBLISHED)

    def _abort(self, worker: SimWorker, fence: Fence, reason: str) -> None:
        worker.handle(on.AbortReceived(self.sim.now, fence, reason))

    def _check_no_waiters(self, fence: Fence) -> None:
        waiting = self.sim.groups[fence].list_waiting(ABORT_TIMEOUT) if fence in self.sim.groups else []
        if waiting and not self.over:
            told = f"{waiting} still wait in world {fence.generation}, aborted {ABORT_TIMEOUT} s ago"
            raise Violation(f"{told}\n{self.event_log.text()}")

    def _receive_version(self, worker: SimWorker, version: MembershipVersion) -> None:
        worker.version = max(worker.version, version)

    def _stop(self, order: do.StopWorker) -> None:
        self.stops[order.worker] = order
        worker = self.sim.worker(order.worker)
        if worker is None or not worker.alive:
            return
        self.held.pop(order.worker, None)
        self._send_to_worker(worker, lambda: worker.handle(on.StopReceived(self.sim.now, order.reason)))
        wait = 0.005 if order.kill else 0.005 + 3.0
        self.sim.schedule(wait, lambda: None if worker.slot.host.cut else worker.die(-9))

    def _release(self, name: str, reason: str) -> None:
        self.sim.released[name] = reason
        slot = self.sim.slots.get(name)
        if slot is not None:
            self.sim.schedule(0.01, lambda: None if slot.host.cut else slot.end(reason))
