"""Tables, the pace of heartbeats, and what a slot's process learns of the job's settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.clusters.local.launcher import LocalSlot
from spark_elastic.config import ElasticConfig
from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotSpec, Table, heartbeat_interval
from spark_elastic.rendezvous import codec

SETTINGS: dict[str, Any] = {"collective_timeout": 7.0, "driver_timeout": 8.0, "spare_after": 9.0}
SETTINGS |= {"fork_workers": False, "worker_port_range": (7000, 7010), "cpus_per_worker": 3}


@given(st.lists(st.tuples(st.integers(0, 40), st.one_of(st.none(), st.integers())), max_size=120))
def test_a_table_is_a_dict_and_never_changes(changes: list[tuple[int, int | None]]) -> None:
    table: Table[int, int] = Table()
    model: dict[int, int] = {}
    for key, value in changes:
        before, frozen = dict(table), table
        if value is None:
            table = table.drop(key)
            model.pop(key, None)
        else:
            table = table.put(key, value)
            model[key] = value
        assert dict(frozen) == before
        assert dict(table) == model
        assert len(table) == len(model)
        assert [k for k in range(41) if k in table] == sorted(model)


@pytest.mark.parametrize(
    ("lease", "slots", "seconds"),
    [
        (5.0, 100, 0.4),
        (5.0, 250, 1.0),
        (5.0, 400, 1.6),
        (5.0, 2000, 2.0),  # the lease bounds it
        (60.0, 2000, 8.0),
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


def test_settings_of_the_config_reach_the_process_of_a_slot_under_their_names() -> None:
    given: dict[str, Any] = {
        "address": "127.0.0.1:7",
        "key": b"\xffsecret",
        "attempt": 2,
        "preload": ("torch",),
    }
    spec = SlotSpec.from_config(ElasticConfig(**SETTINGS), **given)
    assert {name: getattr(spec, name) for name in (SETTINGS | given)} == SETTINGS | given
    assert "secret" not in repr(spec)
    slot = LocalSlot(spec, SlotIdentity(slot=SlotId("5-0"), host="a"), parent=1)
    assert codec.from_line(LocalSlot, codec.to_line(slot)) == slot
