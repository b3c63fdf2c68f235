"""Jobs under faults by a model (`parts/job_model.py`): checked against head to head, then drawn for large clusters.

Columns: what the model says as "ours" and what was measured as "peer"; of the draws, our goodput and a peer's.

A check predicts how long the runs of one plan of head to head take. What goes in: the paces of the peer's undisturbed
runs, second by second; the pace of a worker that is alone and what single faults cost from the *other* plans, and, of
faults that only one plan has, from the other runs of that plan. The predicted run does not enter, or with one number:
the pace of its calm seconds, which says how fast the machine was just then. Each run is predicted by itself, as the
median of many draws; a row has the medians over the runs.

The draws take rates of failures from publications, and costs from this repository's records: how long a silent host
stays unnoticed and a restart of torchrun from head to head, a next world at that size from `control_plane.json`. The
peer goes back to a checkpoint that costs nothing to write, restarts as quickly as two workers do here, and has spare
hosts; we have none. All are jobs whose every worker holds the whole state.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.parts.head_page import rate, select
from benchmarks.parts.job_model import Fault, Job, simulate
from benchmarks.parts.report import Row

RESULTS = Path(__file__).parent / "results"
KILL_PLANS = {"kill": (10.0, 20.0), "often": (5.0, 10.0)}  # the first kill, and seconds between two
HOST_PLANS = {"return": 10.0, "scale": 20.0}  # seconds for which a host is away
STOPS = ("stop", "silence")
SINGLE_PLANS = ("none", "stop", "silence", "driver")  # with a fault that no other plan has
PLANS = ("none", *KILL_PLANS, *HOST_PLANS, *SINGLE_PLANS[1:])
# Who waits for a host that is away and goes back to a checkpoint: how many of the newest a fault finds unfinished.
RESTARTING = {"torchrun": 0, "ray": 1}
STAYS = {"ray"}  # its worker works on while its host leaves with notice, until the host is back
SHARE = {"torchft": 0.5}  # of a step's rows, that a worker which is alone takes
OWN = ", own pace"
YOUNG = 6.0  # seconds after a start, in which Ray's steps take two thirds of the time of later ones
SETTLED = 2.0  # seconds after a stall, or after all workers are there again, until a second counts as calm
ALONE = 0.9  # share of the steps with all workers, below which a stopped one was missed
NEAR = 0.03  # that a prediction should be off by at most
HOST = 8  # workers that fail together
DAY = 86_400.0
RATES = {  # failures of a host a day
    "Llama 3": 419 / 54 / 16_384 * HOST,  # 419 in 54 days on 16,384 GPUs
    "RSC-1": 6.5 / 1000,  # in 1,000 node-days
    "OPT-175B": 100 / 124 / 60,  # 100 of 124 hosts in 2 months
    "spot instances": -math.log(0.8) / 30,  # one of five in a month
    "a storm": 0.24,  # assumed: 1 % of the hosts an hour
}
DAYS = 30
# Assumed: seconds of a step, seconds until a host is replaced, seconds in which a newcomer gets 20 GB.
STEP, AWAY, HAND_OVER = 5.0, 600.0, 1.6
CHECKPOINTS = {"10 minutes": 600.0, "60 minutes": 3600.0}


# ---- the check


class Peer:
    """What head to head has measured of one peer."""

    def __init__(self, record: dict[str, Any], name: str) -> None:
        self.name = name
        self._record = record
        self._steps: int = record["steps"]
        self.waits = name in RESTARTING

    def runs(self, plan: str) -> list[dict[str, Any]]:
        return select(self._record, self.name, plan)

    def slowness(self, run: dict[str, Any], own: bool = False) -> float:
        """How many times as long as usual a step took on that day, or, `own`, in the run's calm seconds."""
        if own:
            calm = list(self._find_calm(run))
            usual = [statistics.mean(self.full_paces(age)) for age, _ in calm]
            return sum(usual) / sum(pace for _, pace in calm)
        usual = statistics.median(rate(other) for other in self.runs("none"))
        return float(usual / run.get("base", usual))

    def full_paces(self, age: float | None = None, without: dict[str, Any] | None = None) -> list[float]:
        """Steps a second in the undisturbed runs, by seconds. age: seconds since the start; of peers that start again,
        those of jobs as young as that, or else of older ones."""
        begin, end = 0.0, math.inf
        if self.waits and age is not None:
            begin, end = (0.0, YOUNG) if age < YOUNG else (YOUNG, math.inf)
        runs = [run for run in self.runs("none") if run is not without]
        return [pace for run in runs for pace in self._paces(run, begin, min(end, run["seconds"]))]

    def _find_calm(self, run: dict[str, Any]) -> Iterator[tuple[float, float]]:
        """Seconds since the start or the last pause, and steps a second, while all workers took steps that stayed."""
        faults, begin, age, undone = run["faults"], 0.0, 0.0, 0.0
        if self.waits and run["plan"] not in STOPS:
            kept = self._record["checkpoint_steps"] * (1 + RESTARTING[self.name])
            undone = 1.0 + kept / statistics.mean(self.full_paces())
        for fault, stall in zip(faults, run["stalls"], strict=True):
            if run["plan"] == "scale" and self.name in STAYS and fault == faults[0]:
                continue
            yield from enumerate(self._paces(run, begin, fault - undone), int(age))
            alone = (1 - run["full"]) / (1 if run["plan"] in HOST_PLANS else len(faults))
            if alone and (fault == faults[0] or run["plan"] in KILL_PLANS):
                until = run["curve"][int(fault)] + alone
                begin = SETTLED + sum(share < until for share in run["curve"])
            begin, age = max(begin, fault + stall + SETTLED), SETTLED
        yield from enumerate(self._paces(run, begin, run["seconds"] - 1.0), int(age))

    def alone_paces(self, without: str) -> list[float]:
        """Steps a second of one worker, in other plans where it is alone for seconds; half of all's where none is."""
        ends = {"return": 20, "scale": 30, "silence": 30}
        runs = [run for plan in ends if plan != without for run in self.runs(plan) if run["full"] < 1]
        paces = [
            pace * self.slowness(run) / SHARE.get(self.name, 1.0)
            for run in runs
            for pace in self._paces(run, run["faults"][0] + 6, ends[run["plan"]])
        ]
        return paces or [pace / 2 for pace in self.full_paces()]

    def _paces(self, run: dict[str, Any], begin: float, end: float) -> list[float]:
        curve = run["curve"][math.ceil(begin) : int(end) + 1]
        return [self._steps * (after - before) for before, after in itertools.pairwise(curve)]

    def pauses(self, run: dict[str, Any]) -> list[float]:
        """Seconds that each fault of a run cost, without the steps taken again."""
        step = self.slowness(run) / statistics.mean(self.full_paces())
        stalls, repeated = run["stalls"], run["rolled_back"] * step
        if self.waits and run["plan"] in HOST_PLANS:  # the first one ends where the host is back
            return [stalls[0], stalls[1] - repeated]
        return [stall - repeated / len(stalls) for stall in stalls]

    def delays(self, run: dict[str, Any]) -> list[float]:
        """Seconds from the time at which there is capacity again until a newcomer takes steps."""
        if run["full"] == 1 or self.waits:
            return []
        alone = self._steps * (1 - run["full"]) / statistics.mean(self.alone_paces(without=run["plan"]))
        if run["plan"] in KILL_PLANS:
            return [(alone + sum(run["stalls"])) / len(run["stalls"])]
        fault, back = run["faults"]
        return [max(0.0, alone + run["stalls"][0] - (back - fault))]


@dataclass(frozen=True)
class Costs:
    """What single faults of a peer have cost, for the prediction of one run."""

    pauses: list[float]
    joins: list[float]
    delays: list[float]


def gather_costs(peer: Peer, run: dict[str, Any]) -> Costs:
    """From other plans, where they have such faults, else from other runs of the plan."""

    def others(plans: Iterable[str]) -> list[dict[str, Any]]:
        return [other for plan in plans if plan != run["plan"] for other in peer.runs(plan)]

    alike = (*KILL_PLANS, *([] if peer.waits else ["return"]))
    twins = [other for other in peer.runs(run["plan"]) if other is not run]
    sources = (others(alike) if run["plan"] in alike else []) or twins
    hosts = others(HOST_PLANS)
    comers = (others(KILL_PLANS) if run["plan"] in KILL_PLANS else []) or hosts
    ends = [1 if other["plan"] in HOST_PLANS else None for other in sources]
    return Costs(
        [pause for other, end in zip(sources, ends, strict=True) for pause in peer.pauses(other)[:end]],
        [peer.pauses(other)[1] for other in hosts],
        [delay for other in comers for delay in peer.delays(other)],
    )


def make_job(
    peer: Peer, run: dict[str, Any], costs: Costs, checkpoint: int, own: bool, dice: random.Random
) -> Job:
    slowness = peer.slowness(run, own)
    alone = peer.alone_paces(without=run["plan"])

    @cache
    def find_full(is_young: bool) -> list[float]:
        return peer.full_paces(0.0 if is_young else YOUNG, without=None if own else run)

    return Job(
        workers=2,
        pace=lambda members, age: dice.choice(find_full(age < YOUNG) if members == 2 else alone) / slowness,
        delay=lambda: dice.choice(costs.delays or [0.0]),
        join=lambda: dice.choice(costs.joins or [0.0]),
        checkpoint=checkpoint if peer.waits and run["plan"] not in STOPS else 0,
        lag=RESTARTING.get(peer.name, 0),
        fewest=2 if peer.waits else 1,
    )


def make_faults(peer: Peer, run: dict[str, Any], costs: Costs, dice: random.Random) -> Iterator[Fault]:
    """What the plan does, in the words of the model. Whether a worker was alone at all is taken from the run."""

    def pause() -> float:
        return dice.choice(costs.pauses)

    plan, alone = run["plan"], int(run["full"] < 1)
    if plan in KILL_PLANS:
        first, every = KILL_PLANS[plan]
        for turn in itertools.count():
            yield Fault(first + every * turn, pause, alone)
    elif plan == "scale" and peer.name in STAYS:
        yield Fault(30.0, lambda: dice.choice(costs.joins))
    elif plan in HOST_PLANS:
        yield Fault(10.0, (lambda: 0.0) if peer.waits else pause, 1, HOST_PLANS[plan])
    elif plan != "none":
        yield Fault(10.0, pause, int(run["full"] < ALONE) if plan in STOPS else 0, 20.0)


def predict(peer: Peer, run: dict[str, Any], record: dict[str, Any], own: bool, draws: int) -> float:
    """Seconds from the first step to the last."""
    dice, costs = random.Random(run["repeat"]), gather_costs(peer, run)
    job = make_job(peer, run, costs, record["checkpoint_steps"], own, dice)
    each = (simulate(job, make_faults(peer, run, costs, dice), record["steps"]) for _ in range(draws))
    return statistics.median(outcome.seconds for outcome in each)


def check(record: dict[str, Any], draws: int, where: str = "") -> list[Row]:
    """Two rows for each peer under each plan: at the pace of undisturbed runs, and of the run's own calm seconds."""
    rows = []
    names = dict.fromkeys(run["peer"] for run in record["runs"])
    for name, plan, own in itertools.product(names, PLANS, (False, True)):
        peer = Peer(record, name)
        runs = peer.runs(plan)
        if not runs or (len(runs) == 1 and plan in SINGLE_PLANS):
            continue
        predicted = statistics.median(predict(peer, run, record, own, draws) for run in runs)
        measured = statistics.median(run["seconds"] for run in runs)
        rows.append(Row(f"{name}, {plan}{where}{OWN if own else ''}", predicted, measured))
    return rows


# ---- the draws


def read_size(record: dict[str, Any], workers: int, what: str) -> float:
    """Seconds in the record of the control plane; between the sizes that were measured on a line of logarithms."""
    pairs = [(row["case"].split(" workers: "), row["ours"]) for row in record["rows"]]
    known = sorted((int(names[0]), seconds) for names, seconds in pairs if names[-1].startswith(what))
    below = max(pair for pair in known if pair[0] <= workers)
    above = min(pair for pair in known if pair[0] >= workers)
    if below == above:
        return float(below[1])
    share = math.log(workers / below[0]) / math.log(above[0] / below[0])
    return float(below[1] ** (1 - share) * above[1] ** share)


def draw_faults(
    per_second: float, pause: Callable[[], float], dice: random.Random, lost: int
) -> Iterator[Fault]:
    at = 0.0
    while True:
        at += dice.expovariate(per_second)
        yield Fault(at, pause, lost, AWAY)


def draw_goodput(
    workers: int, failures: float, pauses: list[float], extra: float, join: float, checkpoint: float
) -> float:
    """Steps done in DAYS days, of those that as many workers without faults do. failures: of a host a day. checkpoint:
    seconds between two; 0: nothing is undone, and a lost host is missing until it is replaced."""
    dice = random.Random(workers)
    job = Job(
        workers,
        pace=lambda members, age: members / workers / STEP,
        join=lambda: join,
        window=math.inf,
        checkpoint=round(checkpoint / STEP),
    )
    faults = draw_faults(
        failures * workers / HOST / DAY, lambda: dice.choice(pauses) + extra, dice, 0 if checkpoint else HOST
    )
    return simulate(job, faults, seconds=DAYS * DAY).steps * STEP / (DAYS * DAY)


def draw(head: dict[str, Any], control: dict[str, Any], sizes: tuple[int, ...]) -> list[Row]:
    """Our goodput beside that of going back to a checkpoint."""
    ours, theirs = Peer(head, "spark_elastic"), Peer(head, "torchrun")
    silent = [pause for run in ours.runs("silence") for pause in ours.pauses(run)]
    restart = [pause for run in theirs.runs("kill") for pause in theirs.pauses(run)]
    rows = []
    for workers, (name, failures) in itertools.product(sizes, RATES.items()):
        world = (
            read_size(control, workers, "next world after a loss") + STEP / 2
        )  # and half a step that is lost
        join = read_size(control, workers, "rendezvous") + HAND_OVER
        own = draw_goodput(workers, failures, silent, world, join, 0.0)
        for often, seconds in CHECKPOINTS.items():
            other = draw_goodput(workers, failures, restart, 0.0, 0.0, seconds)
            case = f"{workers} workers, {name}: goodput, beside checkpoints every {often}"
            rows.append(Row(case, own, other, ""))
    return rows


def measure(draws: int = 400, sizes: tuple[int, ...] = (1000, 10_000)) -> list[Row]:
    """draws: of each run that is predicted. sizes: workers for which is drawn what nobody has measured here."""
    names = ("head_to_head", "head_to_head_quiet", "control_plane")
    full, quiet, control = (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)
    checks = [*check(full, draws), *check(quiet, draws, ", another day")]
    own = [row for row in checks if row.case.endswith(OWN)]
    return [
        *checks,
        count_near("the pace of undisturbed runs", [row for row in checks if row not in own]),
        count_near("their own pace", own),
        *draw(full, control, sizes),
    ]


def count_near(what: str, rows: list[Row]) -> Row:
    near = sum(abs(row.ours / (row.peer or math.nan) - 1) <= NEAR for row in rows)
    return Row(f"predictions at {what} within {NEAR:.0%}, of all", near, len(rows), "")
