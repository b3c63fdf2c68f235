"""Seeded plans of faults and their times: values for a simulation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from spark_elastic.protocol.types import Limits, Phase, Position


class FaultKind(Enum):
    KILL_WORKER = "kill the training process"
    KILL_SLOT = "kill the slot task"
    KILL_HOST = "kill the host"
    STOP_WORKER = "SIGSTOP the training process"
    CUT_OFF_HOST = "cut the host off driver and peers"
    PARTITION_AND_REPLACE = "no packet of the host arrives, and Spark calls its executor lost"
    SLOW_HOST = "slow the host down"
    ADD_HOST = "a host joins"
    DRAIN_HOST = "drain the host"
    SILENCE_SLOT = "the slot sends no heartbeat any more, and does all else"
    DRAIN_WORKER = "drain the worker"
    STRAGGLE = "the worker reports that it keeps the others waiting"
    RAISE = "user code raises once"
    RAISE_AT_ROW = "user code raises at one row, always"
    MASS_DISCONNECT = "the driver's server loses all connections"
    SECOND_ATTEMPT = "the cluster starts a second attempt of a slot job"
    CRASH = "the training process crashes"
    UNDISCOVER = "discovery does not list the host for a while"
    KILL_DRIVER = "the driver dies, and another opens the run"
    TAKE_OVER = "another driver opens the run of one that lives"
    CORRUPT_CHECKPOINT = "the newest checkpoint is damaged in the store"
    DEAD_LINK = "one host's packets to another one are lost; both reach all others and the driver"


class Moment(Enum):
    """What a fault waits for, beside the time."""

    TIME = "time"
    FORMING = "forming"
    SYNCING = "syncing"
    FORWARD = "forward"
    EXCHANGE = "exchange"  # some have contributed
    COMPLETE = "complete"  # some have the result, none has applied it
    APPLIED = "applied"  # some have applied, others not
    REGROUPING = "regrouping"
    CLOSING = "closing"  # some are done
    WARMING = "warming"  # a newcomer starts
    WRITING = "writing"  # a checkpoint is half written
    WRITTEN = "written"  # and whole, but the driver does not know
    PUBLISHED = "published"  # and counts


class Share(Enum):
    """How many of those that it could hit."""

    ONE = "one"
    TWO = "two"
    ALL_BUT_ONE = "all but one"
    ALL = "all"


@dataclass(frozen=True)
class Fault:
    """One fault that is injected once."""

    kind: FaultKind
    moment: Moment = Moment.TIME
    nth: int = 1  # such moment
    after: float = 0.0  # seconds after that moment
    target: int = 0  # number of the first target
    share: Share = Share.ONE  # of the targets
    duration: float = 1.0  # seconds, of a fault that passes
    silent: bool = False  # without a broken connection, as in a loss of power


@dataclass(frozen=True)
class FaultPlan:
    """A job and its faults."""

    seed: int
    limits: Limits
    hosts: int
    slots_per_host: int
    epochs: int = 1
    steps: int = 10  # of an epoch
    rows: int = 96  # of a step
    forward: float = 0.03  # seconds that computing a step takes
    faults: tuple[Fault, ...] = field(default=())
    replace_after: float | None = 1.0  # seconds after which another host replaces a lost one; None: never
    retries: bool = False  # the cluster itself starts a failed slot task again
    checkpoint_every: int | None = None  # steps from one checkpoint to the next; None: no checkpoints
    bitwise: bool = False  # whether steps have the same bits, whichever workers compute them
    before_loop: float = 0.0  # seconds that a program works before its loop, in workers that come later
    duplicates: float = 0.02  # probability that a message comes twice
    # Probability that a message comes again up to 20 s later, whatever happened meanwhile: its sender did not get the
    # answer, or the network held a copy.
    late_copies: float = 0.0
    driver_clock: float = 1.0  # how quickly the driver's clock runs
    # By how many seconds the driver's clock jumps, and when, in seconds of its own.
    driver_jump: tuple[float, float] = (0.0, 0.0)

    def find_next_position(self, position: Position) -> Position:
        """The position one step on; the end is CLOSE of the last epoch."""
        if position.phase is Phase.CLOSE:
            return position
        if position.step + 1 < self.steps:
            return Position(position.epoch, Phase.TRAIN, position.step + 1)
        if position.epoch + 1 < self.epochs:
            return Position(position.epoch + 1, Phase.TRAIN, 0)
        return Position(position.epoch, Phase.CLOSE, 0)

    def positions(self) -> list[Position]:
        """All steps, in order."""
        places = itertools.product(range(self.epochs), range(self.steps))
        return [Position(epoch, Phase.TRAIN, step) for epoch, step in places]

    def compute_rows(self) -> dict[Position, tuple[int, ...]]:
        """Rows of every step."""
        return {position: self.rows_of(position) for position in self.positions()}

    def rows_of(self, position: Position) -> tuple[int, ...]:
        first = position.step * self.rows
        return tuple(range(first, first + self.rows))


QUICK: Any = {"gather_timeout": 2.0, "start_timeout": 40.0, "lease": 2.0, "regroup_timeout": 6.0}


def random_plan(seed: int) -> FaultPlan:
    """A plan with up to 64 workers and up to a dozen faults."""
    rng = random.Random(seed)
    most = rng.choice((1, 2, 2, 3, 3, 4, 4, 6, 8, 8, 12, 16, 24, 64))
    wanted = rng.randint(max(1, most // 2), most)
    per_host = rng.choice((1, 1, 2, 4))
    hosts = max(1, -(-wanted // per_host) + rng.choice((-1, 0, 0, 0, 1)))
    limits = Limits(
        wanted,
        rng.randint(1, max(1, min(wanted, 1 + wanted // 2, hosts * per_host))),
        most,
        **QUICK,
        failure_budget=1000,
        max_global_batch=rng.choice((None, None, None, 96)),
        cooldown_range=rng.choice(((1.0, 60.0), (0.2, 2.0), (6.0, 12.0), (0.5, 30.0))),
        idle_slot_timeout=rng.choice((60.0, 2.0)),
        all_results=seed % 2 == 1,
    )
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6, 12))
    plan = FaultPlan(
        seed=seed,
        limits=limits,
        hosts=hosts,
        slots_per_host=per_host,
        epochs=rng.choice((1, 1, 2)),
        steps=rng.randint(4, 8) if most > 16 else rng.randint(5, 20),
        faults=tuple(_random_fault(rng) for _ in range(count)),
        replace_after=rng.choice((0.2, 1.0, 3.0, 3.0, None)),
        retries=rng.random() < 0.3,
        duplicates=rng.choice((0.0, 0.02, 0.2)),
        bitwise=seed % 3 == 0,
    )
    links = random.Random(f"links {seed}")
    if links.random() < DEAD_LINK_SHARE:
        plan = replace(plan, faults=(*plan.faults, _draw_dead_link(links)))
    silences = random.Random(f"silences {seed}")
    if silences.random() < SILENT_SLOT_SHARE:
        moment, nth, target = silences.choice(MOMENTS[1:]), silences.randint(1, 20), silences.randrange(64)
        silence = Fault(FaultKind.SILENCE_SLOT, moment, nth, target=target)
        plan = replace(plan, faults=(*plan.faults, silence))
    network = random.Random(f"network {seed}")
    plan = replace(
        plan,
        late_copies=network.choice((0.0, 0.0, 0.1, 0.3)),
        driver_clock=network.choice((1.0, 1.0, 1.0, 0.5, 2.0)),
        driver_jump=(network.choice((0.0, 0.0, 3600.0, -3600.0)), network.uniform(0.5, 6.0)),
    )
    durable = random.Random(f"durable {seed}")
    return _with_checkpoints(durable, plan) if durable.random() < DURABLE_SHARE else plan


def _draw_dead_link(rng: random.Random) -> Fault:
    return Fault(
        FaultKind.DEAD_LINK,
        moment=rng.choice(MOMENTS[1:]),
        nth=rng.choice((1, 2, 3, 5)),
        target=rng.randrange(64),
        share=rng.choice((Share.TWO, Share.TWO, Share.ALL)),
        duration=rng.choice((0.8, 4.0, 12.0, 90.0)),
    )


def _with_checkpoints(rng: random.Random, plan: FaultPlan) -> FaultPlan:
    """The plan with checkpoints, and with faults that concern them and the driver."""
    limits = replace(plan.limits, checkpoints_kept=rng.choice((1, 2, 3)), driver_timeout=DRIVER_TIMEOUT)
    faults = tuple(_draw_durable_fault(rng) for _ in range(rng.choice((1, 2, 2, 3))))
    every = rng.choice((1, 2, 3, 5))
    return replace(plan, limits=limits, faults=(*plan.faults, *faults), checkpoint_every=every)


def _draw_durable_fault(rng: random.Random) -> Fault:
    kind, share = rng.choice(DURABLE_KINDS)
    return Fault(
        kind,
        moment=rng.choice((*DURABLE_MOMENTS, *MOMENTS[1:])),
        nth=rng.choice((1, 1, 2, 3, 5)),
        after=rng.choice((0.0, rng.uniform(0.0, 0.1))),
        target=rng.randrange(64),
        share=share,
        duration=rng.choice((0.8, 4.0)),
        silent=rng.random() < 0.3,
    )


DRIVER_TIMEOUT = 10.0  # R12 (driver silence): seconds after which a worker ends itself
DURABLE_SHARE = 0.3  # of the random plans
DEAD_LINK_SHARE = 0.1  # of the random plans
SILENT_SLOT_SHARE = 0.04
DURABLE_MOMENTS = (Moment.WRITING, Moment.WRITTEN, Moment.PUBLISHED)
MOMENTS = tuple(moment for moment in Moment if moment not in DURABLE_MOMENTS)
DURABLE_KINDS = (
    (FaultKind.KILL_DRIVER, Share.ONE),
    (FaultKind.KILL_DRIVER, Share.ONE),
    (FaultKind.TAKE_OVER, Share.ONE),
    (FaultKind.CORRUPT_CHECKPOINT, Share.ONE),
    (FaultKind.KILL_WORKER, Share.ALL),
    (FaultKind.KILL_SLOT, Share.ALL),
    (FaultKind.STOP_WORKER, Share.ALL),
    (FaultKind.PARTITION_AND_REPLACE, Share.ALL),
)
KINDS = (
    (FaultKind.KILL_WORKER, 6),
    (FaultKind.KILL_SLOT, 3),
    (FaultKind.KILL_HOST, 3),
    (FaultKind.STOP_WORKER, 3),
    (FaultKind.CUT_OFF_HOST, 3),
    (FaultKind.SLOW_HOST, 1),
    (FaultKind.ADD_HOST, 3),
    (FaultKind.DRAIN_HOST, 2),
    (FaultKind.DRAIN_WORKER, 2),
    (FaultKind.STRAGGLE, 2),
    (FaultKind.RAISE, 2),
    (FaultKind.RAISE_AT_ROW, 1),
    (FaultKind.MASS_DISCONNECT, 2),
    (FaultKind.SECOND_ATTEMPT, 2),
    (FaultKind.CRASH, 4),
    (FaultKind.UNDISCOVER, 3),
)


def _random_fault(rng: random.Random) -> Fault:
    kinds, weights = zip(*KINDS, strict=True)
    moment = rng.choice((Moment.TIME, *MOMENTS))
    timed = moment is Moment.TIME
    return Fault(
        kind=rng.choices(kinds, weights)[0],
        moment=moment,
        nth=1 if timed else rng.choice((1, 1, 2, 3, 5)),
        after=rng.uniform(0.0, 4.0) if timed else _draw_delay(rng),
        target=rng.choice((0, 0, 1, rng.randrange(64))),
        share=rng.choices(tuple(Share), (12, 3, 1, 1))[0],
        duration=rng.choice((0.02, 0.3, 0.8, 1.5, 4.0, 12.0)),
        silent=rng.random() < 0.3,
    )


def _draw_delay(rng: random.Random) -> float:
    return rng.choice((0.0, rng.uniform(0.0, 0.01), rng.uniform(0.0, 0.1)))


STORM_STEP = 0.8  # seconds that a step of a storm computes, so that the storm lasts few steps
STORM_START = 3.0  # seconds from the beginning until the first host is lost
DRIVER_CUT = 3.0  # seconds


def plan_storm(seed: int, hosts: int = 1000, slots_per_host: int = 10) -> FaultPlan:
    """A plan in which a large cluster loses and gains hosts by the hundred.

    Each slot has a worker. Then a quarter of the hosts is lost within 0.2 s, half of them silently. While others
    replace them, more are drained or cut off, and come back. The driver is cut off from all for longer than half a
    lease, while more are lost. In the end all but one die and are replaced again.
    """
    rng = random.Random(seed)
    workers = hosts * slots_per_host

    def draw_wave(kind: FaultKind, share: float, at: float, **more: Any) -> Iterator[Fault]:
        for _ in range(round(hosts * share)):
            after, target = at + rng.uniform(0.0, 0.2), rng.randrange(hosts)
            yield Fault(kind, after=after, target=target, **more)

    faults = (
        *draw_wave(FaultKind.KILL_HOST, 0.125, STORM_START),
        *draw_wave(FaultKind.KILL_HOST, 0.125, STORM_START, silent=True),
        *draw_wave(FaultKind.DRAIN_HOST, 0.05, STORM_START + 1.0),
        *draw_wave(FaultKind.CUT_OFF_HOST, 0.05, STORM_START + 1.0, duration=0.8),
    )
    cut = Fault(FaultKind.MASS_DISCONNECT, after=STORM_START + 2.5, duration=DRIVER_CUT)
    meanwhile = draw_wave(FaultKind.KILL_HOST, 0.05, STORM_START + 3.0)
    survivor, at = rng.randrange(hosts), STORM_START + 3.5 + DRIVER_CUT
    end = Fault(FaultKind.KILL_HOST, after=at, target=survivor, share=Share.ALL_BUT_ONE)
    quick = {"gather_timeout": 2.0, "start_timeout": 40.0, "regroup_timeout": 6.0}
    limits = Limits(workers, 1, workers, **quick, failure_budget=workers)  # type: ignore[arg-type]
    return FaultPlan(
        seed, limits, hosts, slots_per_host, steps=4, rows=2 * workers, forward=STORM_STEP,
        faults=(*faults, cut, *meanwhile, end), replace_after=1.0, duplicates=0.01,
    )  # fmt: skip


def scene(*faults: Fault, seed: int = 1, hosts: int = 4, steps: int = 12, **limits: Any) -> FaultPlan:
    """Four workers on four hosts and what happens to them: enough room, no other misfortune."""
    all_limits = replace(Limits(4, 1, 4, **QUICK), **limits)
    return FaultPlan(seed, all_limits, hosts, slots_per_host=1, steps=steps, faults=faults)


def plan_durable(*faults: Fault, every: int = 2, **of_scene: Any) -> FaultPlan:
    """A scene with checkpoints. every: steps from one to the next."""
    return replace(scene(*faults, **of_scene), checkpoint_every=every)


ALL_KILLED = Fault(FaultKind.KILL_WORKER, Moment.PUBLISHED, nth=3, share=Share.ALL)
CORRUPTED = (
    Fault(FaultKind.CORRUPT_CHECKPOINT, Moment.PUBLISHED, nth=3),
    replace(ALL_KILLED, after=0.001),
)
TAKEN_OVER = Fault(FaultKind.TAKE_OVER, Moment.PUBLISHED, nth=2)
