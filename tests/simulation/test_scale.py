"""Storms: hosts are lost, cut off and join by the dozen, and in `nox -s faults` by the hundred, with 10,000 workers. So
is the driver cut off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from spark_elastic.protocol.commands import JobOutcome
from tests.simulator.fault_plan import STORM_START, Fault, FaultKind, plan_storm
from tests.simulator.simulation import simulate

THOUSAND = pytest.param(1000, marks=[pytest.mark.faults, pytest.mark.timeout(1800)])


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    """Of a million events with all that they refer to, the garbage collector would take half of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("hosts", [20, THOUSAND])
def test_a_storm_costs_no_step(hosts: int) -> None:
    """The simulation judges the rest: every row once, replicas identical, invariants at each world."""
    report = simulate(plan_storm(seed=1, hosts=hosts))
    assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
    sizes, workers = [world.size for world in report.worlds], 10 * hosts
    assert sizes[0] == workers
    assert min(sizes) <= 10
    assert any(0.6 * workers < size < 0.9 * workers for size in sizes), sizes
    assert all(world.source is not None for world in report.worlds[1:]), "somebody always survives"


@pytest.mark.parametrize("hosts", [20, THOUSAND])
def test_r18_another_driver_resumes_in_a_storm(hosts: int) -> None:
    plan = plan_storm(seed=1, hosts=hosts)
    dies = Fault(FaultKind.KILL_DRIVER, after=STORM_START + 1.8)
    report = simulate(replace(plan, faults=(*plan.faults, dies), checkpoint_every=1))
    assert report.end.outcome is JobOutcome.SUCCESS, report.event_log
    of_second = [world for world in report.worlds if world.fence.attempt == 2]
    assert of_second[0].resume, "it begins from the last checkpoint of the first"
    assert all(world.source is not None for world in of_second)
