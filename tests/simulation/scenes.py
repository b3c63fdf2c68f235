"""Plans of one or two faults for the scenarios: enough room, no other misfortune."""

from __future__ import annotations

from dataclasses import replace

from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fault_plan import Fault, FaultPlan

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
