"""A server on a free port of this machine, closed after each test with its clients; and a network before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.component.rendezvous.cut_connections import CuttableNetwork
from tests.component.rendezvous.driver_side import Driver, start_driver


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = start_driver()
    yield made
    made.close()


@pytest.fixture
def network(driver: Driver) -> Iterator[CuttableNetwork]:
    made = CuttableNetwork(driver.port)
    yield made
    made.close()
