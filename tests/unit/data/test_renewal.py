"""Credentials that end: when others are asked for, and what happens if there are none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from spark_elastic.data import object_store
from spark_elastic.data.object_store import Lease, RenewedCredentials
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.testing import FakeClock


@dataclass
class Vendor:
    """Vends credentials that end after some seconds, or raises."""

    clock: FakeClock = field(default_factory=FakeClock)
    seconds: float | None = 100.0
    error: Exception | None = None
    vended: int = 0
    name: str = "t"

    def fetch(self) -> Lease:
        if self.error is not None:
            raise self.error
        self.vended += 1
        return Lease({"key": self.vended}, None if self.seconds is None else self.clock.wall() + self.seconds)


@pytest.fixture
def vendor() -> Iterator[Vendor]:
    vendor = Vendor()
    with patch.object(object_store, "_CLOCK", vendor.clock):
        yield vendor


def test_others_are_asked_for_before_the_end_and_not_long_before(vendor: Vendor) -> None:
    held = RenewedCredentials(vendor)
    first = held.get()
    vendor.clock.advance(69)
    assert held.get() is held.lease is first
    vendor.clock.advance(22)
    assert held.lease is None
    assert held.get().options == {"key": 2}


def test_while_they_are_valid_a_catalog_may_be_away(vendor: Vendor, caplog: pytest.LogCaptureFixture) -> None:
    held = RenewedCredentials(vendor)
    first = held.get()
    vendor.error = ConnectionError("nobody is there")
    vendor.clock.advance(95)
    assert held.get() is first
    assert "not renewed yet: nobody is there" in caplog.text
    assert held.lease is first  # it is not asked at each request
    vendor.clock.advance(5)
    with pytest.raises(ConnectionError):
        held.get()
    vendor.error = InvalidInput("The catalog says no.")
    with pytest.raises(StoreError, match=r"have ended and cannot be renewed: The catalog says no\."):
        held.get()
    vendor.error = None
    assert held.get().options == {"key": 2}


@pytest.mark.parametrize("seconds", [None, -5.0])
def test_those_without_an_end_and_those_that_our_clock_takes_for_ended_stay_until_they_are_refused(
    vendor: Vendor, seconds: float | None
) -> None:
    vendor.seconds = seconds
    held = RenewedCredentials(vendor)
    first = held.get()
    vendor.clock.advance(1e6)
    assert held.get() is first
    held.refuse(first)
    second = held.get()
    assert second.options == {"key": 2}
    held.refuse(first)  # by a request that was under way
    assert held.get() is second
