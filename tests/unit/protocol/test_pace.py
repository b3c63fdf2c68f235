"""Beats of a slot grow rarer with the number of slots, and never so rare that the lease is in danger."""

from __future__ import annotations

import pytest

from spark_elastic.protocol.types import heartbeat_interval


@pytest.mark.parametrize(
    ("lease", "slots", "seconds"),
    [
        (5.0, 1, 0.4),
        (5.0, 100, 0.4),
        (5.0, 250, 1.0),
        (5.0, 400, 1.6),
        (5.0, 2000, 2.0),  # the lease bounds it
        (20.0, 2000, 8.0),
        (60.0, 2000, 8.0),
        (1.0, 1, 0.2),
        (1.0, 2000, 0.4),
    ],
)
def test_seconds_between_two_heartbeats(lease: float, slots: int, seconds: float) -> None:
    assert heartbeat_interval(lease, slots) == pytest.approx(seconds)


@pytest.mark.parametrize("lease", [1.0, 5.0, 30.0])
def test_r12_half_a_lease_is_never_without_a_heartbeat(lease: float) -> None:
    """Otherwise the driver would take itself to be cut off; and one lost heartbeat evicts no worker."""
    for slots in (1, 10, 300, 3000, 10**6):
        assert heartbeat_interval(lease, slots) < lease / 2
        assert 2 * heartbeat_interval(lease, slots) < lease
