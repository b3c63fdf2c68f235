"""1,000 random fault plans with up to 64 workers: invariants after every step, the history at the end."""

from __future__ import annotations

from collections import Counter

import pytest

from spark_elastic.protocol.commands import JobOutcome
from tests.simulator.fault_plan import FaultKind, random_plan
from tests.simulator.simulation import Report, simulate

PLANS = 1000
CHUNK = 25


def _play(first: int) -> list[Report]:
    """A broken plan raises with its seed, its story and itself: `simulate(random_plan(seed))` replays it."""
    return [simulate(random_plan(seed)) for seed in range(first, first + CHUNK)]


@pytest.mark.parametrize("first", range(0, PLANS, CHUNK))
def test_random_fault_plans_keep_all_promises(first: int) -> None:
    reports = _play(first)
    ends = Counter(report.end.outcome for report in reports)
    assert set(ends) <= {JobOutcome.SUCCESS, JobOutcome.USER_ERROR, JobOutcome.NOT_ENOUGH_WORKERS}
    assert ends[JobOutcome.SUCCESS] >= CHUNK * 0.7, ends
    for report in reports:
        if report.end.outcome is JobOutcome.USER_ERROR:
            may_end = {FaultKind.RAISE, FaultKind.RAISE_AT_ROW, FaultKind.DEAD_LINK}
            assert may_end & {fault.kind for fault in report.injected}, report.event_log


def test_random_fault_plans_contain_every_kind_of_fault() -> None:
    plans = [random_plan(seed) for seed in range(PLANS)]
    kinds = Counter(fault.kind for plan in plans for fault in plan.faults)
    assert all(kinds[kind] >= 10 for kind in FaultKind), kinds
    assert max(plan.limits.max_workers for plan in plans) == 64
    assert sum(plan.checkpoint_every is not None for plan in plans) > PLANS / 4
    assert sum(plan.late_copies > 0 for plan in plans) > PLANS / 4
    assert {plan.driver_clock for plan in plans} == {0.5, 1.0, 2.0}
    assert {plan.driver_jump[0] for plan in plans} == {0.0, 3600.0, -3600.0}


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = simulate(random_plan(51)), simulate(random_plan(51))
    assert first == second
    assert len(first.worlds) > 4
