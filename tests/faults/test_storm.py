"""10,000 workers on 1,000 hosts: losses and joins by the hundred. Minutes, hence not in every build."""

from __future__ import annotations

import pytest

from tests.simulation.scenes import weather


@pytest.mark.faults
def test_a_storm_over_ten_thousand_workers() -> None:
    weather(hosts=1000)
