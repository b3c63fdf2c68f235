"""Storms: hosts are lost and join by the dozen. `tests/faults` has them by the hundred, with 10,000 workers."""

from __future__ import annotations

import pytest

from tests.simulator.scenes import survive_storm


@pytest.mark.parametrize("hosts", [20, pytest.param(100, marks=pytest.mark.timeout(300))])
def test_the_loss_of_many_hosts_at_once_costs_no_step(hosts: int) -> None:
    survive_storm(hosts)
