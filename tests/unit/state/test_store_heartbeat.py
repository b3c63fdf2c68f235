"""A heartbeat in a store: its watcher waits while the count grows; a failing store is no sign of death."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spark_elastic.errors import StoreError
from spark_elastic.runs.store_channel import LOOK_EVERY, STALE_AFTER, StoreHeartbeat, wait_until_stale
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store

NAME = "channels/1/heartbeat"


class ClockWithAction(FakeClock):
    """Does something at each sleep."""

    def __init__(self, act: Callable[[float], None]) -> None:
        super().__init__()
        self._act = act

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._act(self.now())


def test_a_heartbeat_exists_while_its_block_runs() -> None:
    store = make_memory_store()
    written: list[str] = []
    write = type(store).write_bytes
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            type(store), "write_bytes", lambda *arguments: (written.append("x"), write(*arguments))
        )
        with StoreHeartbeat(store, NAME):
            pass
    assert written == ["x"], "at once"
    assert not store.exists(NAME)


@pytest.mark.parametrize(("until", "tolerance"), [(100, STALE_AFTER), (0, LOOK_EVERY)])
def test_the_wait_lasts_until_the_heartbeat_is_stale(until: float, tolerance: float) -> None:
    """One that is absent is."""
    store = make_memory_store()

    def write_heartbeat(now: float) -> None:
        if now < until:
            store.write_bytes(NAME, str(int(now / (STALE_AFTER - 1))).encode())

    clock = ClockWithAction(write_heartbeat)
    wait_until_stale(store, NAME, clock)
    assert clock.now() == pytest.approx(until + STALE_AFTER, abs=tolerance)


def test_a_failing_store_does_not_make_a_heartbeat_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_memory_store()
    exists = type(store).exists

    def look(self: object, name: str) -> bool:
        if clock.now() < 60:
            raise StoreError("gone for a minute")
        return exists(store, name)

    monkeypatch.setattr(type(store), "exists", look)
    clock = FakeClock()
    wait_until_stale(store, NAME, clock)
    assert clock.now() >= 60
