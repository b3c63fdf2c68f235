"""A server on a free port of this machine, closed after each test together with its clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.component.rendezvous.driver_side import Driver, start_driver


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = start_driver()
    yield made
    made.close()
