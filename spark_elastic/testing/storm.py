"""Storms: plans in which a large cluster loses and gains hosts by the hundred, for `simulate`. Pure values."""

from __future__ import annotations

import random

from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fault_plan import Fault, FaultPlan, Kind, Share

STEP = 0.8  # seconds that a step computes: the storm blows over few steps
CALM = 3.0  # seconds from the beginning until the first host is lost


def storm(seed: int, hosts: int = 1000, slots_per_host: int = 10) -> FaultPlan:
    """A worker in each slot; then a quarter of the hosts is lost within 0.2 s, half of them without a word, and while
    others take their place more are drained or cut off; in the end all but one die, and others come again."""
    rng = random.Random(seed)
    workers = hosts * slots_per_host

    def wave(kind: Kind, share: float, at: float, duration: float = 1.0, silent: bool = False) -> list[Fault]:
        return [
            Fault(
                kind,
                after=at + rng.uniform(0.0, 0.2),
                target=rng.randrange(hosts),
                duration=duration,
                silent=silent,
            )
            for _ in range(round(hosts * share))
        ]

    faults = (
        *wave(Kind.KILL_HOST, 0.125, CALM),
        *wave(Kind.KILL_HOST, 0.125, CALM, silent=True),
        *wave(Kind.DRAIN_HOST, 0.05, CALM + 1.0),
        *wave(Kind.CUT_HOST, 0.05, CALM + 1.0, duration=0.8),
        Fault(Kind.KILL_HOST, after=CALM + 3.5, target=rng.randrange(hosts), share=Share.ALL_BUT_ONE),
    )
    limits = Limits(
        num_workers=workers,
        min_workers=1,
        max_workers=workers,
        gather_timeout=2.0,
        start_timeout=40.0,
        regroup_timeout=6.0,
        failure_budget=workers,
    )
    return FaultPlan(
        seed, limits, hosts, slots_per_host, steps=4, rows=2 * workers, forward=STEP, faults=faults,
        replace_after=1.0, duplicates=0.01,
    )  # fmt: skip
