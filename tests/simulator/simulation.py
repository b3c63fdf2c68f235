"""A simulated cluster over simulated time: the real machines of driver and workers under a fault plan.

`simulate(plan)` plays a job to its end and checks the invariants after every step and the history at the end. A
plan and its seed give the same run each time. One thread; nothing here waits.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import driver_machine, worker_machine
from spark_elastic.protocol import events as on
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position, SlotId, WorkerId, World
from spark_elastic.runs.checkpoint import CheckpointStore, OwnedRun, format_checkpoint_name
from tests.memory_store import make_memory_store
from tests.simulator.fault_injection import FaultInjection
from tests.simulator.fault_plan import DRIVER_TIMEOUT, Fault, FaultPlan, Moment
from tests.simulator.group import SimGroup
from tests.simulator.hosts import INITIAL_WEIGHTS, SimHost, SimSlot, SimWorker
from tests.simulator.invariants import CheckpointInvariants, EventLog, StepHistory, Violation
from tests.simulator.server import SimServer, Step

if TYPE_CHECKING:
    from tests.simulator.server import SimServer


RUN = "simulated"
PART = "state"
Weights = tuple[int, int]


class SimRun:
    """A durable run in a store of its own, and the drivers that open it one after the other. Store, checkpoints and
    ownership are the real ones, over memory, in simulated time."""

    def __init__(self, sim: Simulation, make: Callable[[OwnedRun], SimServer]) -> None:
        self.sim = sim
        self.checkpoint_invariants = CheckpointInvariants(sim.event_log)
        self.servers: list[SimServer] = []
        self._make = make
        self._store = make_memory_store()
        self._checkpoints = CheckpointStore(self._store, RUN)

    def open(self) -> None:
        """A driver acquires the run, and continues from the checkpoints that count."""
        held = OwnedRun.acquire(self._store, RUN)
        self.checkpoint_invariants.record_opened(held.attempt)
        self.servers.append(self._make(held))
        self.servers[-1].open()

    def close(self) -> None:
        """The run is over: end the drivers that lost it and live on."""
        for server in self.servers[:-1]:
            if not server.over:
                server.post(on.CancelRequested(0, "the run is over"))

    # ---- faults of drivers and store

    def kill_driver(self, silent: bool) -> None:
        """The driver dies and another opens the run. The slots of the first end with it or, if their connections do not
        break, after the driver's timeout."""
        server, rng = self.servers[-1], self.sim.rng
        server.dead = True
        for slot in self.sim.slots.values():
            if slot.server is server:
                delay = DRIVER_TIMEOUT if silent else rng.uniform(0.0, 0.5)
                self.sim.schedule(delay, partial(slot.end, "its driver is gone", failed=True))
        self.sim.schedule(rng.uniform(0.05, 2.0), self.open)

    def take_over(self) -> None:
        """Another driver, with hosts of its own, opens the run although this one lives."""
        for _ in range(self.sim.plan.hosts):
            self.sim.add_host()
        self.open()

    def damage_newest(self) -> None:
        """Damage the newest published checkpoint, if an older published one is whole."""
        listed = self._checkpoints.read_published()
        if len(listed) > 1 and listed[1].name not in self.checkpoint_invariants.damaged:
            self._store.write_bytes(self._object(listed[0].name), b"[0, 0, 0, 0, 0]")
            self.checkpoint_invariants.damaged.add(listed[0].name)

    # ---- checkpoints

    def write_half(self, fence: Fence, position: Position) -> None:
        self._store.write_bytes(self._object(format_checkpoint_name(fence, position)), b"[0,")

    def write(self, fence: Fence, position: Position, weights: Weights) -> Checkpoint:
        data = json.dumps([position.epoch, position.phase, position.step, *weights]).encode()
        return self._checkpoints.write(fence, position, {PART: data})

    def load(self, world: World) -> tuple[Position, Weights]:
        """The position and weights that the world begins from."""
        checkpoint, parts = self._checkpoints.read_first_undamaged(world.resume)
        self.checkpoint_invariants.check_resumed(world, checkpoint)
        epoch, phase, step, count, text = json.loads(parts[PART])
        return Position(epoch, Phase(phase), step), (count, text)

    def _object(self, name: str) -> str:
        return f"runs/{RUN}/checkpoints/{name}/{PART}"


WorkerStep = Callable[[worker_machine.WorkerState, on.WorkerEvent], worker_machine.StepResult]
DEADLINE = 600.0  # simulated seconds in which every plan must end
SHUTDOWN_TIMEOUT = 30.0  # simulated seconds after the end in which all slots must be gone


@dataclass(frozen=True)
class Report:
    """The outcome of a plan."""

    end: do.End
    worlds: tuple[World, ...]
    seconds: float  # simulated
    injected: tuple[Fault, ...]  # the faults whose moment came
    event_log: str


def simulate(
    plan: FaultPlan, driver_step: Step = driver_machine.step, worker_step: WorkerStep = worker_machine.step
) -> Report:
    """Run the plan to its end, on the real machines or on wrappers that break a rule. Raises Violation, with seed and
    log, where an invariant or the step history is broken, or the job does not end."""
    sim = Simulation(plan, driver_step, worker_step)
    try:
        return sim.run_to_end()
    except Violation as error:
        raise Violation(f"seed {plan.seed}: {error}\nplan: {plan}") from error


class Simulation:
    """The event queue, the cluster, and the steps that the program applied."""

    def __init__(self, plan: FaultPlan, driver_step: Step, worker_step: WorkerStep) -> None:
        self.plan = plan
        self.worker_step = worker_step
        self.rng = random.Random(plan.seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.silent = False  # deaths that happen now break no connection
        self.hosts: list[SimHost] = []
        self.dead_links: set[frozenset[str]] = set()  # pairs of hosts whose workers cannot exchange anything
        self.slots: dict[SlotId, SimSlot] = {}
        self.released: dict[str, str] = {}
        self._waiting_launches: deque[tuple[SimServer, int]] = deque()  # that wait for room
        self._rooms: list[tuple[int, int, SimHost]] = []  # heap: the roomiest host first; may be out of date
        self._last_present: SimSlot | None = None  # one of those that are not gone yet
        self._slots_of_launch: dict[tuple[SimServer, int], list[SimSlot]] = {}
        self._shares: dict[tuple[int, Position], tuple[int, ...]] = {}
        self._attempts: dict[int, int] = {}
        self.groups: dict[Fence, SimGroup] = {}
        self._history = StepHistory()
        self.event_log = EventLog()
        self.run = SimRun(self, lambda held: SimServer(self, driver_step, held, self.event_log))
        self.faults = FaultInjection(self)

    @property
    def server(self) -> SimServer:
        """The newest driver."""
        return self.run.servers[-1]

    def run_to_end(self) -> Report:
        """Run to the end of the job, and until all slots are gone."""
        for _ in range(self.plan.hosts):
            self.add_host()
        self.run.open()
        self.faults.schedule_faults()
        self._run_until(lambda: self.server.end is not None, DEADLINE, "the job did not end")
        seconds = self.now
        self._check_result()
        self.run.close()
        self._run_until(self._are_all_gone, self.now + SHUTDOWN_TIMEOUT, "still there after the end")
        assert self.server.end is not None
        return Report(
            self.server.end,
            tuple(world for server in self.run.servers for world in server.worlds),
            seconds,
            tuple(self.faults.injected),
            self.event_log.text(),
        )

    # ---- time

    def schedule(self, delay: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, act))

    def jitter(self, typical: float) -> float:
        return typical * self.rng.uniform(0.5, 1.5)

    def moment(self, moment: Moment) -> None:
        self.faults.notice(moment)

    def _run_until(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        while not done():
            if not self._queue or self._queue[0][0] > deadline:
                waiting = ", ".join(f"{w.name} {w.state.stage.value}" for w in self.workers() if w.alive)
                raise Violation(f"{what} by {deadline:g} s (alive: {waiting})\n{self.event_log.text()}")
            self.now, _, act = heapq.heappop(self._queue)
            act()

    def _are_all_gone(self) -> bool:
        if self._last_present is None or not self._last_present.alive or self._last_present.host.cut:
            # Slots go in the order in which they came, so the last one stays longest.
            there = (slot for slot in reversed(self.slots.values()) if slot.alive and not slot.host.cut)
            self._last_present = next(there, None)
        return self._last_present is None

    # ---- the cluster

    def add_host(self) -> None:
        host = SimHost(f"h{len(self.hosts) + 1}", len(self.hosts), self.plan.slots_per_host)
        self.hosts.append(host)
        self.faults.welcome(host)
        self.offer_host(host)
        self.schedule(0.01, self._schedule)

    def launch(self, server: SimServer, launch: int) -> None:
        self.schedule(0.02, lambda: self._queue_launch(server, launch))

    def _queue_launch(self, server: SimServer, launch: int) -> None:
        self._waiting_launches.append((server, launch))
        self._schedule()

    def _schedule(self) -> None:
        while self._waiting_launches:
            server, launch = self._waiting_launches[0]
            host = None if server.over else self._find_roomiest()
            if host is None and not server.over:
                return
            self._waiting_launches.popleft()
            if host is None:
                continue
            attempt = self._attempts.get(launch, -1) + 1
            self._attempts[launch] = attempt
            name = SlotId.build(launch, attempt)
            slot = self.slots[name] = SimSlot(self, server, name, launch, host)
            self._slots_of_launch.setdefault((server, launch), []).append(slot)

    def offer_host(self, host: SimHost) -> None:
        """The host may have more room than before."""
        if host.count_room() > 0 and not host.cut:
            heapq.heappush(self._rooms, (-host.count_room(), host.number, host))

    def _find_roomiest(self) -> SimHost | None:
        while self._rooms:
            room, _, host = self._rooms[0]
            if room == -host.count_room() and not host.cut:
                return host
            heapq.heappop(self._rooms)
            self.offer_host(host)
        return None

    def start_second_attempt(self, slot: SimSlot) -> None:
        """Speculation, or a retry: the cluster runs a launch's task once more. See R14 (duplicates)."""
        self._queue_launch(slot.server, slot.launch)

    def end_attempt(self, slot: SimSlot, reason: str, failed: bool) -> None:
        """An attempt of a launch's task is gone. As in Spark, one that returned ends the launch and its other attempts;
        one that failed leaves them alone or, with retries, is followed by another."""
        rivals = [s for s in self._slots_of_launch[slot.server, slot.launch] if s.alive]
        if failed and rivals:
            return
        if failed and self.plan.retries:
            self.schedule(0.1, lambda: self.start_second_attempt(slot))
            return
        for rival in rivals:
            rival.leave()
            if rival.worker is not None:
                rival.worker.die(-9, quiet=True)
        ended = on.LaunchEnded(0, slot.launch, reason)
        self.schedule(self.rng.uniform(0.02, 0.5), lambda: slot.server.post(ended))
        self.schedule(0.6, self._schedule)

    def workers(self) -> list[SimWorker]:
        """All training processes that live."""
        return [s.worker for s in self.slots.values() if s.worker is not None and s.worker.alive]

    def worker(self, name: WorkerId) -> SimWorker | None:
        slot = self.slots.get(name.slot)
        worker = slot.worker if slot is not None else None
        return worker if worker is not None and worker.name == name else None

    def group(self, world: World) -> SimGroup:
        if world.fence not in self.groups:
            self.groups[world.fence] = SimGroup(self, world)
        return self.groups[world.fence]

    # ---- the program

    def record_applied(self, worker: SimWorker, world: World, position: Position) -> None:
        if position.phase is Phase.TRAIN:
            self._history.record_applied(world.fence, position, self._rows(world, position))

    def _rows(self, world: World, position: Position) -> tuple[int, ...]:
        """The union of the ranks' rows (docs/protocol.md, "The data plan")."""
        key = world.size, position
        if key not in self._shares:
            rows = self.plan.rows_of(position)
            count, size = len(rows), world.size
            shares = (rows[count * rank // size : count * (rank + 1) // size] for rank in range(size))
            self._shares[key] = tuple(row for share in shares for row in share)
        return self._shares[key]

    def _check_result(self) -> None:
        """P1 and P4 at the end of a job that ended well."""
        end = self.server.end
        assert end is not None
        if end.outcome is not do.JobOutcome.SUCCESS:
            return
        try:
            self._history.check(self.plan.compute_rows())
        except Violation as error:
            raise Violation(f"{error}\n{self.event_log.text()}") from error
        weights = INITIAL_WEIGHTS
        for position in self.plan.positions():
            weights = (weights[0] + 1, hash((weights[1], position.epoch, position.step)))
        whole = self.plan.limits.all_results
        wrong = [result for result in end.results if result not in ("null", f"{weights[0]}:{weights[1]}")]
        if wrong or "null" in (end.results if whole else end.results[:1]):
            told = f"the final weights are not those of the plan: {end.results}"
            raise Violation(f"{told}\n{self.event_log.text()}")
