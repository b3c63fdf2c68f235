"""Storms: hosts are lost and join by the dozen. `tests/faults` has them by the hundred, with 10,000 workers."""

from __future__ import annotations

import pytest

from spark_elastic.protocol.commands import Outcome
from spark_elastic.testing.simulation import simulate
from spark_elastic.testing.storm import storm


@pytest.mark.parametrize("hosts", [20, pytest.param(100, marks=pytest.mark.timeout(300))])
def test_a_storm_costs_no_step_and_ends_well(hosts: int) -> None:
    weather(hosts)


def weather(hosts: int) -> None:
    """Play a storm. The simulation judges the rest: every row once, replicas identical, invariants at each world."""
    report = simulate(storm(seed=1, hosts=hosts))
    assert report.end.outcome is Outcome.SUCCESS, report.story
    sizes = [world.size for world in report.worlds]
    workers = 10 * hosts
    assert sizes[0] == workers
    assert min(sizes) <= 10
    assert any(0.6 * workers < size < 0.9 * workers for size in sizes), sizes
    assert all(world.source is not None for world in report.worlds[1:]), "somebody always survives"
