"""Makes a plan's faults happen in a simulation, each at its moment."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from spark_elastic.protocol import events as on
from tests.simulator.fault_plan import DRIVER_TIMEOUT, Fault, Kind, Moment, Share

if TYPE_CHECKING:
    from tests.simulator.hosts import SimHost, SimSlot, SimWorker
    from tests.simulator.simulation import Simulation

T = TypeVar("T")
OF_WORKERS = (
    Kind.KILL_WORKER, Kind.CRASH, Kind.KILL_SLOT, Kind.STOP_WORKER, Kind.DRAIN_WORKER, Kind.RAISE,
)  # fmt: skip


class Strikes:
    """Counts moments and lets faults loose."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.struck: list[Fault] = []
        self._counts: Counter[Moment] = Counter()
        self._armed = list(sim.plan.faults)
        self._poison: tuple[int, int] | None = None  # (epoch, step) and, by rank, the row that raises

    def arm(self) -> None:
        for fault in self.sim.plan.faults:
            if fault.moment is Moment.TIME:
                self._armed.remove(fault)
                self.sim.at(fault.after, partial(self._strike, fault))

    def notice(self, moment: Moment) -> None:
        if not self._armed:
            return
        self._counts[moment] += 1
        for fault in [f for f in self._armed if f.moment is moment and f.nth <= self._counts[moment]]:
            self._armed.remove(fault)
            self.sim.at(fault.after, partial(self._strike, fault))

    def poisoned(self, worker: SimWorker) -> str:
        """R13: one row of one step raises on whichever rank it falls to."""
        if self._poison is None or worker.group is None:
            return ""
        member = worker.group.world.member(worker.name)
        position = worker.position
        step, row = self._poison
        mine = member is not None and member.rank == row * worker.group.world.size // self.sim.plan.rows
        return f"poison at step {step}" if mine and position.step == step else ""

    # ---- what happens

    def _strike(self, fault: Fault) -> None:
        if self.sim.desk.over:
            return
        self.struck.append(fault)
        self.sim.story.note(self.sim.now, f"{fault.kind.value} ({fault.share.value}, {fault.moment.value})")
        match fault.kind:
            case Kind.ADD_HOST:
                self.sim.add_host()
            case Kind.HICCUP:
                for host in self._living():
                    self._cut(host, fault.duration)
            case Kind.SPECULATE:
                for worker in _choose(self._in_order(), fault):
                    self.sim.second_attempt(worker.slot)
            case Kind.UNLIST:
                self._unlist(_choose(self._living(), fault), fault.duration)
            case Kind.KILL_DRIVER:
                self.sim.run.kill_driver(fault.silent)
            case Kind.TAKE_OVER:
                self.sim.run.take_over()
            case Kind.DAMAGE:
                self.sim.run.damage_newest()
            case Kind.POISON:
                self._poison = (fault.target % self.sim.plan.steps, fault.nth * 17 % self.sim.plan.rows)
            case kind if kind in OF_WORKERS:
                for worker in _choose(self._in_order(), fault):
                    self._hit_worker(worker, fault)
            case _:
                for host in _choose(self._living(), fault):
                    self._hit_host(host, fault)

    def _living(self) -> list[SimHost]:
        return [host for host in self.sim.hosts if host.alive]

    def _in_order(self) -> list[SimWorker]:
        """Members of the last world by rank, then the others."""
        world = self.sim.desk.worlds[-1] if self.sim.desk.worlds else None
        ranks = {member.worker: member.rank for member in world.members} if world is not None else {}
        return sorted(self.sim.workers(), key=lambda worker: ranks.get(worker.name, len(ranks)))

    def _hit_worker(self, worker: SimWorker, fault: Fault) -> None:
        self.sim.story.note(self.sim.now, f"  on {worker.name}")
        match fault.kind:
            case Kind.KILL_WORKER:
                worker.die(-9)
            case Kind.CRASH:
                worker.die(-11)
            case Kind.KILL_SLOT:
                self._kill_slots([worker.slot], fault)
            case Kind.STOP_WORKER:
                worker.stop()
                self.sim.at(fault.duration, worker.proceed)
            case Kind.DRAIN_WORKER:
                self.sim.desk.post(on.DrainRequested(0, "its worker was asked to leave", worker=worker.name))
            case Kind.RAISE:
                worker.raises = f"flaky {worker.name}"

    def _hit_host(self, host: SimHost, fault: Fault) -> None:
        self.sim.story.note(self.sim.now, f"  on {host.name}")
        match fault.kind:
            case Kind.KILL_HOST:
                self._kill_host(host, fault)
            case Kind.CUT_HOST:
                self._cut(host, fault.duration)
            case Kind.LOSE_SIGHT:
                self._lose_sight(host, fault.duration)
            case Kind.SLOW_HOST:
                host.slowness = 5.0
                self.sim.at(fault.duration, lambda: setattr(host, "slowness", 1.0))
            case Kind.DRAIN_HOST:
                self.sim.desk.post(on.DrainRequested(0, "decommissioning", host=host.name))
                host.capacity = 0  # takes no new slots
                self.sim.at(3.0 + fault.duration, lambda: self._kill_host(host, fault))
                self._replace_host()

    def _unlist(self, hosts: list[SimHost], seconds: float) -> None:
        """Discovery answers without them, and after a while that everybody may take part."""
        listed = tuple((host.name, max(1, host.capacity)) for host in self._living() if host not in hosts)
        self.sim.desk.post(on.HostsDiscovered(0, listed))
        self.sim.at(seconds, self._list_all)

    def _list_all(self) -> None:
        if not self.sim.desk.over:
            self.sim.desk.post(on.HostsDiscovered(0, None))

    def _kill_slots(self, slots: list[SimSlot], fault: Fault) -> None:
        self.sim.silent = fault.silent
        for slot in slots:
            if slot.alive:
                slot.desk.lost(slot)
                slot.end("the slot task was killed", failed=True)
        self.sim.silent = False

    def _kill_host(self, host: SimHost, fault: Fault) -> None:
        if not host.alive:
            return
        host.alive = False
        self._kill_slots(host.slots, fault)
        lost = on.HostLost(0, host.name, "executor lost")
        self.sim.at(self.sim.rng.uniform(0.1, 3.0), lambda: self.sim.desk.post(lost))
        if fault.kind is Kind.KILL_HOST:
            self._replace_host()

    def _replace_host(self) -> None:
        if self.sim.plan.replace_after is not None:
            self.sim.at(self.sim.plan.replace_after, self.sim.add_host)

    def _cut(self, host: SimHost, seconds: float) -> None:
        """Off the driver, not off its peers: R12 has training go on."""
        if host.cut:
            return
        host.cut = True
        for slot in host.slots:
            if slot.alive:
                slot.desk.cut(slot)
        if seconds > DRIVER_TIMEOUT:
            self.sim.at(DRIVER_TIMEOUT, lambda: self._silent_driver(host))
        self.sim.at(seconds, lambda: self._heal(host))

    def _lose_sight(self, host: SimHost, seconds: float) -> None:
        """As `_cut`, but without a broken connection; and Spark gives the executor up, whose processes go on."""
        self.sim.silent = True
        self._cut(host, seconds)
        self.sim.silent = False
        host.capacity = 0  # takes no new slots
        self.sim.at(self.sim.rng.uniform(0.5, 3.0), lambda: self._disown(host))
        self._replace_host()

    def _disown(self, host: SimHost) -> None:
        heard_of = {(slot.desk, slot.job) for slot in host.slots if slot.alive}
        self.sim.desk.post(on.HostLost(0, host.name, "its heartbeats timed out"))
        for desk, job in heard_of:
            desk.post(on.LaunchEnded(0, job, "its executor is lost", executor_lost=True))

    def _silent_driver(self, host: SimHost) -> None:
        for slot in host.slots:
            if slot.worker is not None:
                slot.worker.happens(on.DriverSilent(self.sim.now, DRIVER_TIMEOUT))

    def _heal(self, host: SimHost) -> None:
        host.cut = False
        host.healed = self.sim.now
        self.sim.offer(host)
        pending, host.pending = host.pending, []
        for act in pending:
            act()
        for slot in host.slots:
            if slot.alive:
                slot.desk.heal(slot)


def _choose(targets: list[T], fault: Fault) -> list[T]:
    if not targets:
        return []
    first = fault.target % len(targets)
    order = targets[first:] + targets[:first]
    count = {Share.ONE: 1, Share.TWO: 2, Share.ALL_BUT_ONE: len(order) - 1, Share.ALL: len(order)}[
        fault.share
    ]
    return order[:count]
