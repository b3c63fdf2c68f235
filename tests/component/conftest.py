"""Slots that stay warm from one job to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.component.warm_slots import WarmLauncher, WarmSlots
from tests.leaks import SessionOwned


@pytest.fixture(scope="session", autouse=True)
def warm_slots(session_owned: SessionOwned) -> Iterator[None]:
    with closing(WarmSlots(session_owned)) as WarmLauncher.pool:
        yield
    WarmLauncher.pool = None
