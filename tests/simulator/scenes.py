"""Plans of one or two faults for the scenarios: enough room, no other misfortune."""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol.commands import JobOutcome
from spark_elastic.protocol.types import Limits
from tests.simulator.fault_plan import Fault, FaultPlan, plan_storm
from tests.simulator.simulation import simulate

LIMITS = Limits(
    num_workers=4,
    min_workers=1,
    max_workers=4,
    gather_timeout=2.0,
    start_timeout=40.0,
    lease=2.0,
    regroup_timeout=6.0,
)


def scene(*faults: Fault, seed: int = 1, hosts: int = 4, steps: int = 12, **limits: object) -> FaultPlan:
    """Four workers on four hosts and what happens to them."""
    return FaultPlan(
        seed=seed,
        limits=replace(LIMITS, **limits),  # type: ignore[arg-type]
        hosts=hosts,
        slots_per_host=1,
        steps=steps,
        faults=faults,
    )


def survive_storm(hosts: int) -> None:
    """Play a storm. The simulation judges the rest: every row once, replicas identical, invariants at each world."""
    report = simulate(plan_storm(seed=1, hosts=hosts))
    assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
    sizes = [world.size for world in report.worlds]
    workers = 10 * hosts
    assert sizes[0] == workers
    assert min(sizes) <= 10
    assert any(0.6 * workers < size < 0.9 * workers for size in sizes), sizes
    assert all(world.source is not None for world in report.worlds[1:]), "somebody always survives"
