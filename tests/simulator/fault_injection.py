"""Injects a plan's faults into a simulation, each at its moment."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from spark_elastic.protocol import events as on
from spark_elastic.protocol.messages import WorkerStraggles
from tests.simulator.fault_plan import DRIVER_TIMEOUT, Fault, FaultKind, Moment, Share

if TYPE_CHECKING:
    from tests.simulator.hosts import SimHost, SimSlot, SimWorker
    from tests.simulator.simulation import Simulation

T = TypeVar("T")
WORKER_FAULTS = (
    FaultKind.KILL_WORKER, FaultKind.CRASH, FaultKind.KILL_SLOT, FaultKind.STOP_WORKER, FaultKind.DRAIN_WORKER,
    FaultKind.RAISE, FaultKind.STRAGGLE, FaultKind.SILENCE_SLOT,
)  # fmt: skip


class FaultInjection:
    """Counts moments and injects the faults that are due."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.injected: list[Fault] = []
        self._counts: Counter[Moment] = Counter()
        self._armed = list(sim.plan.faults)
        self._driver_cut_until = -math.inf  # off all hosts, also those that come meanwhile
        self._failing_row: tuple[int, int] | None = None  # (epoch, step) and, by rank, the row that raises

    def schedule_faults(self) -> None:
        for fault in self.sim.plan.faults:
            if fault.moment is Moment.TIME:
                self._armed.remove(fault)
                self.sim.schedule(fault.after, partial(self._inject, fault))

    def notice(self, moment: Moment) -> None:
        if not self._armed:
            return
        self._counts[moment] += 1
        for fault in [f for f in self._armed if f.moment is moment and f.nth <= self._counts[moment]]:
            self._armed.remove(fault)
            self.sim.schedule(fault.after, partial(self._inject, fault))

    def welcome(self, host: SimHost) -> None:
        """A host that joins while the driver is cut off is not reached either."""
        if self.sim.now < self._driver_cut_until:
            self._cut(host, self._driver_cut_until - self.sim.now)

    def find_exception(self, worker: SimWorker) -> str:
        """R13 (deterministic failures): one row of one step raises on the rank that gets it."""
        if self._failing_row is None or worker.group is None:
            return ""
        member = worker.group.world.member(worker.name)
        position = worker.position
        step, row = self._failing_row
        mine = member is not None and member.rank == row * worker.group.world.size // self.sim.plan.rows
        return f"failing row at step {step}" if mine and position.step == step else ""

    # ---- injection

    def _inject(self, fault: Fault) -> None:
        if self.sim.server.over:
            return
        self.injected.append(fault)
        text = f"{fault.kind.value} ({fault.share.value}, {fault.moment.value})"
        self.sim.event_log.note(self.sim.now, text)
        match fault.kind:
            case FaultKind.ADD_HOST:
                self.sim.add_host()
            case FaultKind.MASS_DISCONNECT:
                self._driver_cut_until = self.sim.now + fault.duration
                for host in self._list_living():
                    self._cut(host, fault.duration)
            case FaultKind.SECOND_ATTEMPT:
                for worker in _choose(self._list_in_order(), fault):
                    self.sim.start_second_attempt(worker.slot)
            case FaultKind.UNDISCOVER:
                self._hide_from_discovery(_choose(self._list_living(), fault), fault.duration)
            case FaultKind.DEAD_LINK:
                self._break_link(_choose(self._list_living(), fault), fault.duration)
            case FaultKind.KILL_DRIVER:
                self.sim.run.kill_driver(fault.silent)
            case FaultKind.TAKE_OVER:
                self.sim.run.take_over()
            case FaultKind.CORRUPT_CHECKPOINT:
                self.sim.run.damage_newest()
            case FaultKind.RAISE_AT_ROW:
                self._failing_row = (fault.target % self.sim.plan.steps, fault.nth * 17 % self.sim.plan.rows)
            case kind if kind in WORKER_FAULTS:
                for worker in _choose(self._list_in_order(), fault):
                    self._inject_into_worker(worker, fault)
            case _:
                for host in _choose(self._list_living(), fault):
                    self._inject_into_host(host, fault)

    def _list_living(self) -> list[SimHost]:
        return [host for host in self.sim.hosts if host.alive]

    def _list_in_order(self) -> list[SimWorker]:
        """Members of the last world by rank, then the others."""
        world = self.sim.server.worlds[-1] if self.sim.server.worlds else None
        ranks = {member.worker: member.rank for member in world.members} if world is not None else {}
        return sorted(self.sim.workers(), key=lambda worker: ranks.get(worker.name, len(ranks)))

    def _inject_into_worker(self, worker: SimWorker, fault: Fault) -> None:
        self.sim.event_log.note(self.sim.now, f"  on {worker.name}")
        match fault.kind:
            case FaultKind.KILL_WORKER:
                worker.die(-9)
            case FaultKind.CRASH:
                worker.die(-11)
            case FaultKind.KILL_SLOT:
                self._kill_slots([worker.slot], fault)
            case FaultKind.STOP_WORKER:
                worker.stop()
                self.sim.schedule(fault.duration, worker.resume)
            case FaultKind.DRAIN_WORKER:
                self.sim.server.post(
                    on.DrainRequested(0, "the worker was asked to leave", worker=worker.name)
                )
            case FaultKind.STRAGGLE:
                fence = self.sim.server.state.fence
                self.sim.server.post(WorkerStraggles(worker.name, fence, "the others are quicker without it"))
            case FaultKind.SILENCE_SLOT:
                worker.slot.is_silent = True
            case FaultKind.RAISE:
                worker.raises = f"flaky {worker.name}"

    def _inject_into_host(self, host: SimHost, fault: Fault) -> None:
        self.sim.event_log.note(self.sim.now, f"  on {host.name}")
        match fault.kind:
            case FaultKind.KILL_HOST:
                self._kill_host(host, fault)
            case FaultKind.CUT_OFF_HOST:
                self._cut(host, fault.duration)
            case FaultKind.PARTITION_AND_REPLACE:
                self._partition_and_replace(host, fault.duration)
            case FaultKind.SLOW_HOST:
                host.slowness = 5.0
                self.sim.schedule(fault.duration, lambda: setattr(host, "slowness", 1.0))
            case FaultKind.DRAIN_HOST:
                self.sim.server.post(on.DrainRequested(0, "decommissioning", host=host.name))
                host.capacity = 0  # takes no new slots
                self.sim.schedule(3.0 + fault.duration, lambda: self._kill_host(host, fault))
                self._replace_host()

    def _hide_from_discovery(self, hosts: list[SimHost], seconds: float) -> None:
        """Discovery answers without these hosts, and after a while that all hosts may take part."""
        shown = [host for host in self._list_living() if host not in hosts]
        listed = tuple((host.name, max(1, host.capacity)) for host in shown)
        self.sim.server.post(on.HostsDiscovered(0, listed))
        self.sim.schedule(seconds, self._discover_all)

    def _discover_all(self) -> None:
        if not self.sim.server.over:
            self.sim.server.post(on.HostsDiscovered(0, None))

    def _kill_slots(self, slots: list[SimSlot], fault: Fault) -> None:
        self.sim.silent = fault.silent
        for slot in slots:
            if slot.alive:
                slot.server.lose_connection(slot)
                slot.end("the slot task was killed", failed=True)
        self.sim.silent = False

    def _kill_host(self, host: SimHost, fault: Fault) -> None:
        if not host.alive:
            return
        host.alive = False
        self._kill_slots(host.slots, fault)
        lost = on.HostLost(0, host.name, "executor lost")
        self.sim.schedule(self.sim.rng.uniform(0.1, 3.0), lambda: self.sim.server.post(lost))
        if fault.kind is FaultKind.KILL_HOST:
            self._replace_host()

    def _replace_host(self) -> None:
        if self.sim.plan.replace_after is not None:
            self.sim.schedule(self.sim.plan.replace_after, self.sim.add_host)

    def _cut(self, host: SimHost, seconds: float) -> None:
        """Cut the host off from the driver, not from its peers: under R12 (driver silence) training continues."""
        if host.cut:
            return
        host.cut = True
        for slot in host.slots:
            if slot.alive:
                slot.server.cut_connections(slot)
        if seconds > DRIVER_TIMEOUT:
            self.sim.schedule(DRIVER_TIMEOUT, lambda: self._time_out_driver(host))
        self.sim.schedule(seconds, lambda: self._heal(host))

    def _break_link(self, hosts: list[SimHost], seconds: float) -> None:
        """Between the first of these hosts and each of the others."""
        links = {frozenset((hosts[0].name, host.name)) for host in hosts[1:]}
        self.sim.dead_links |= links
        if seconds < math.inf:
            self.sim.schedule(seconds, lambda: self.sim.dead_links.difference_update(links))

    def _partition_and_replace(self, host: SimHost, seconds: float) -> None:
        """As `_cut`, but no connection breaks, and Spark gives up the executor, whose processes keep running."""
        self.sim.silent = True
        self._cut(host, seconds)
        self.sim.silent = False
        host.capacity = 0  # takes no new slots
        self.sim.schedule(self.sim.rng.uniform(0.5, 3.0), lambda: self._lose_executor(host))
        self._replace_host()

    def _lose_executor(self, host: SimHost) -> None:
        heard_of = {(slot.server, slot.launch) for slot in host.slots if slot.alive}
        self.sim.server.post(on.HostLost(0, host.name, "its heartbeats timed out"))
        for server, job in heard_of:
            server.post(on.LaunchEnded(0, job, "its executor is lost", executor_lost=True))

    def _time_out_driver(self, host: SimHost) -> None:
        for slot in host.slots:
            if slot.worker is not None:
                slot.worker.handle(on.DriverSilent(self.sim.now, DRIVER_TIMEOUT))

    def _heal(self, host: SimHost) -> None:
        host.cut = False
        host.healed = self.sim.now
        self.sim.offer_host(host)
        pending, host.pending = host.pending, []
        for act in pending:
            act()
        for slot in host.slots:
            if slot.alive:
                slot.server.heal(slot)


def _choose(targets: list[T], fault: Fault) -> list[T]:
    if not targets:
        return []
    first = fault.target % len(targets)
    order, most = targets[first:] + targets[:first], len(targets)
    counts = {Share.ONE: 1, Share.TWO: 2, Share.ALL_BUT_ONE: most - 1, Share.ALL: most}
    return order[: counts[fault.share]]
