"""10,000 workers on 1,000 hosts: losses and joins by the hundred. Minutes, hence not in every build."""

from __future__ import annotations

import pytest

from tests.simulator.scenes import survive_storm


@pytest.mark.faults
def test_ten_thousand_workers_survive_the_loss_of_a_quarter_of_their_hosts() -> None:
    survive_storm(hosts=1000)
