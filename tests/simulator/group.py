"""The group of one simulated world: forming, sync, exchanges, and how they break.

A death at any point leaves some ranks with a step's result and others without it. A rank that has the result applies it
whole: R1 (finalized steps).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.protocol import events as on
from spark_elastic.protocol.messages import WorldFormed
from spark_elastic.protocol.types import MembershipVersion, Phase, Position, World
from tests.simulator.fault_plan import Moment
from tests.simulator.invariants import Violation

if TYPE_CHECKING:
    from tests.simulator.hosts import SimWorker
    from tests.simulator.simulation import Simulation

COLLECTIVE_TIMEOUT = 4.0  # seconds that a rank waits for its peers
# Probability that a peer names the rank that broke. Others are woken as the group breaks, without a name.
NAMES_SUSPECT = 0.5


LARGE = 100  # members


class Activity(Enum):
    NOTHING = "nothing"
    FORMING = "forming"
    SYNCING = "syncing"
    FORWARD = "forward"
    EXCHANGE = "exchange"
    APPLYING = "applying"  # has the result; nothing can interrupt it


WAITING = (Activity.FORMING, Activity.SYNCING, Activity.EXCHANGE)


class SimGroup:
    """The members of a world that have come to form its group."""

    def __init__(self, sim: Simulation, world: World) -> None:
        self.sim = sim
        self.world = world
        self.inside: dict[str, SimWorker] = {}
        self.activity: dict[str, Activity] = {}
        self._count: Counter[Activity] = Counter()  # of `doing`
        self._unaware: dict[str, SimWorker] = {}  # have not seen a peer leave; used in large worlds only
        self.broken: dict[str, str] = {}  # worker -> why its end of the group is broken
        self.arrived: dict[str, MembershipVersion] = {}  # worker -> membership version that it contributed
        self.position: Position | None = None  # of the exchange that is under way
        self.epoch = 0  # counts collectives, so that a timer knows whether its one is over

    # ---- the worker's calls

    def form(self, worker: SimWorker) -> None:
        self.inside[worker.name] = worker
        self._unaware[worker.name] = worker
        begun = self._begin(worker, Activity.FORMING)
        self.sim.moment(Moment.FORMING)
        if begun:  # without the others: connections open at first use
            delay = self.sim.rng.uniform(0.0002, 0.005)
            worker.act_later(delay, partial(self._deliver, worker, Activity.FORMING, self._finish_forming))

    def sync(self, worker: SimWorker) -> None:
        if not self._begin(worker, Activity.SYNCING):
            return
        self.sim.moment(Moment.SYNCING)
        if self._is_complete(Activity.SYNCING):
            assert self.world.source is not None
            source = self.inside[self.world.members[self.world.source].worker]
            weights, position = source.weights, self.world.position
            if self.world.resume:
                position, weights = self.sim.run.load(self.world)
            assert position is not None
            self._complete(Activity.SYNCING, lambda w: self._finish_sync(w, weights, position), slowest=0.05)

    def forward(self, worker: SimWorker) -> None:
        """Compute; then contribute."""
        self._set_activity(worker, Activity.FORWARD)
        self.sim.moment(Moment.FORWARD)
        seconds = self.sim.jitter(self.sim.plan.forward) * worker.slot.host.slowness
        worker.act_later(seconds, lambda: self._contribute(worker))

    def abort(self, worker: SimWorker, reason: str) -> None:
        """Break the worker's end of the group, which ends a wait in it."""
        self.broken.setdefault(worker.name, reason)
        if self.activity.get(worker.name) in WAITING:
            self._break(worker, (), reason)

    def close(self, worker: SimWorker) -> None:
        """Its sockets close, and those of the peers that still need it break."""
        if self.inside.pop(worker.name, None) is not None:
            self._set_activity(worker, None)
            self.arrived.pop(worker.name, None)
            self._unaware.pop(worker.name, None)
            self._notify_peers(worker)

    def list_waiting(self, for_seconds: float) -> list[str]:
        """Workers that wait in this group although they ran and were reachable for so long."""
        reachable = self.sim.now - for_seconds
        return [
            name
            for name, worker in self.inside.items()
            if self.activity.get(name) in WAITING and worker.reachable_since < reachable
        ]

    # ---- collectives

    def _begin(self, worker: SimWorker, what: Activity) -> bool:
        """Enter a collective. False if the group is broken, which the worker learns."""
        self._set_activity(worker, what)
        if worker.name in self.broken:
            self._break(worker, (), self.broken[worker.name])
            return False
        epoch = self.epoch
        worker.act_later(COLLECTIVE_TIMEOUT, lambda: self._time_out(worker, what, epoch))
        return True

    def _set_activity(self, worker: SimWorker, what: Activity | None) -> None:
        """None: the worker is not inside any more."""
        before = self.activity.pop(worker.name, None)
        if before is not None:
            self._count[before] -= 1
        worker.waits_since = self.sim.now if what in WAITING else None
        if what is not None:
            self.activity[worker.name] = what
            self._count[what] += 1

    def _is_complete(self, what: Activity) -> bool:
        if self._find_dead_links():
            return False
        return len(self.inside) == self.world.size == self._count[what]

    def _find_dead_links(self) -> set[frozenset[str]]:
        """Those between hosts of members."""
        if not self.sim.dead_links:
            return set()
        hosts = {member.host for member in self.world.members}
        return {link for link in self.sim.dead_links if link <= hosts}

    def _complete(self, what: Activity, finish: Callable[[SimWorker], None], slowest: float = 0.005) -> None:
        """All members are there: each gets the result at its own time, unless its end breaks before."""
        self.epoch += 1
        for worker in tuple(self.inside.values()):
            delay = self.sim.rng.uniform(0.0002, slowest)
            worker.act_later(delay, partial(self._deliver, worker, what, finish))

    def _deliver(self, worker: SimWorker, what: Activity, finish: Callable[[SimWorker], None]) -> None:
        if self.activity.get(worker.name) is what and worker.name not in self.broken:
            self._set_activity(worker, Activity.NOTHING)
            finish(worker)

    def _time_out(self, worker: SimWorker, what: Activity, epoch: int) -> None:
        if self.activity.get(worker.name) is what and self.epoch == epoch:
            late = tuple(m.rank for m in self.world.members if self.activity.get(m.worker) is not what)
            links = self._find_dead_links()
            if links:
                here = worker.slot.host.name
                behind = {host for link in links if here in link for host in link if host != here}
                late = tuple(m.rank for m in self.world.members if m.host in behind)
                if not late:
                    return  # it hears from all its peers: those at the link know the cause
            self.broken.setdefault(worker.name, "timeout")
            self._break(worker, late, f"ranks {late} did not come within {COLLECTIVE_TIMEOUT} s")

    def _notify_peers(self, gone: SimWorker) -> None:
        member = self.world.member(gone.name)
        assert member is not None
        for worker in self._choose_witnesses():
            named = (member.rank,) if self.sim.rng.random() < NAMES_SUSPECT else ()
            reason = f"rank {member.rank} closed its connection"
            delay = self.sim.rng.uniform(0.0005, 0.01)
            worker.act_later(delay, partial(self._peer_broke, worker, named, reason))

    def _choose_witnesses(self) -> tuple[SimWorker, ...]:
        """The workers that see a peer leave: all of them; in a large world each only once, since a second time changes
        nothing."""
        if self.world.size <= LARGE:
            return tuple(self.inside.values())
        untold, self._unaware = tuple(self._unaware.values()), {}
        return untold

    def _peer_broke(self, worker: SimWorker, suspects: tuple[int, ...], reason: str) -> None:
        if worker.name not in self.inside:
            return
        self.broken.setdefault(worker.name, reason)
        if self.activity.get(worker.name) in WAITING:
            self._break(worker, suspects, reason)

    def _break(self, worker: SimWorker, suspects: tuple[int, ...], reason: str) -> None:
        self._set_activity(worker, Activity.NOTHING)
        worker.checkpointer.discard_copied()
        worker.handle(on.GroupBroken(self.sim.now, self.world.fence, suspects, reason))

    # ---- what a rank gets

    def _finish_forming(self, worker: SimWorker) -> None:
        worker.slot.server.receive(worker.slot, WorldFormed(worker.name, self.world.fence))
        worker.act_later(0.002, lambda: worker.handle(on.GroupFormed(self.sim.now, self.world.fence)))

    def _finish_sync(self, worker: SimWorker, weights: tuple[int, int], position: Position) -> None:
        """R5 (staging): state and position change together."""
        member = self.world.member(worker.name)
        assert member is not None
        if member.rank in self.world.receivers:
            worker.weights = weights
        elif worker.weights != weights:
            raise Violation(f"{worker.name} and rank {self.world.source} differ at {position} (P4)")
        worker.handle(on.Synced(self.sim.now, self.world.fence, position))

    def _contribute(self, worker: SimWorker) -> None:
        if worker.name not in self.inside or not self._begin(worker, Activity.EXCHANGE):
            return
        position = worker.position
        if not self.arrived:
            self.position = position
        if position != self.position:
            raise Violation(f"{worker.name} contributes to {position}, others to {self.position}")
        self.arrived[worker.name] = worker.version
        self.sim.moment(Moment.EXCHANGE)
        if len(self.arrived) == self.world.size and not self._find_dead_links():
            newest = max(self.arrived.values())
            self.arrived = {}
            self._complete(Activity.EXCHANGE, partial(self._finish_exchange, newest=newest), slowest=0.02)

    def _finish_exchange(self, worker: SimWorker, newest: MembershipVersion) -> None:
        """R6 (step summary): apply, then stop if the summary has a newer version than the world's."""
        self._set_activity(worker, Activity.APPLYING)
        self.sim.moment(Moment.COMPLETE)
        if worker.position.phase is Phase.CLOSE:
            worker.checkpointer.write_copied(self.world.fence)
            worker.finish(self.world)
        else:
            worker.act_later(self.sim.jitter(0.002), lambda: self._apply(worker, newest > self.world.version))

    def _apply(self, worker: SimWorker, stop: bool) -> None:
        if worker.name not in self.inside:
            return
        worker.apply(self.world)
        self.sim.moment(Moment.APPLIED)
        self._set_activity(worker, Activity.NOTHING)
        if stop:
            worker.handle(on.Boundary(self.sim.now, self.world.fence, "the membership changes"))
        else:
            worker.train()
