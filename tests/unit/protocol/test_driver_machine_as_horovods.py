"""U1: the unit tests of Horovod's elastic driver, as tests of the machine under their names.

Six of the fourteen are marked where the rule that they show is tested: `test_rank_and_size`,
`test_wait_for_available_slots`, `test_wait_for_min_hosts`, `test_all_workers_fail`, `test_shutdown_on_success` and
`test_shutdown_on_initial_discovery_failure`.
"""

from __future__ import annotations

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import (
    AbortWorld,
    AnnounceChange,
    StopWorker,
)
from spark_elastic.protocol.messages import (
    RegisterSlot,
    RequestNextWorld,
)
from spark_elastic.protocol.types import INITIAL_VERSION, HostUpdateResult, SlotId
from tests.unit.protocol.driver_bench import Bench, at, name

TWO_HOSTS = (("host-1", 2), ("host-2", 2))
ONE_JOINS = INITIAL_VERSION.next(update=HostUpdateResult.added)


def _slots(bench: Bench, *jobs: int) -> None:
    """Jobs 1 and 2 on the first host, 3 and 4 on the second."""
    for job in jobs:
        bench.slot(job, "host-1" if job < 3 else "host-2")
        bench.join(name(job))


def _bench(**limits: object) -> Bench:
    bench = Bench(**limits)  # type: ignore[arg-type]
    bench.on(on.HostsDiscovered(0, TWO_HOSTS))
    return bench


@pytest.mark.scenario("U1")
def test_rank_and_size_with_host_failure() -> None:
    bench = _bench()
    _slots(bench, 1, 2, 3, 4)
    bench.form()
    bench.on(on.HostLost(0, "host-1", "power"))
    bench.regroup(3, name(3), name(4))
    assert bench.members() == [name(3), name(4)]
    assert {m.cross_size for m in bench.world.members} == {1}


@pytest.mark.scenario("U1")
def test_rank_and_size_with_host_added() -> None:
    bench = _bench(gather_timeout=1.0)
    bench.on(on.HostsDiscovered(0, TWO_HOSTS[:1]))
    _slots(bench, 1, 2)
    bench.wait(1.1, heartbeats_of=[1, 2])
    bench.form()
    bench.on(on.HostsDiscovered(0, TWO_HOSTS))
    _slots(bench, 3, 4)
    bench.wait(0.2, heartbeats_of=[1, 2, 3, 4])
    bench.stop_planned(5, name(1), name(2))
    assert bench.members() == [name(1), name(2), name(3), name(4)]


@pytest.mark.scenario("U1")
def test_host_shutdown_on_worker_failure() -> None:
    """Once two of a host's slots failed it is given back whole; one alone costs itself (W21)."""
    bench = _bench(cooldown_range=(20.0, 60.0))
    _slots(bench, 1, 2, 3, 4)
    bench.form()
    bench.exit(name(1), 1)
    assert not bench.released
    bench.exit(name(2), 1)
    assert set(bench.released) == {"1-0", "2-0"}


@pytest.mark.scenario("U1")
def test_worker_notification_manager() -> None:
    """W14: the version grows, and all workers hear it, also when a change comes while another is under way."""
    bench = _bench(max_workers=4, num_workers=2, gather_timeout=1.0)
    _slots(bench, 1, 3)
    bench.wait(1.1, heartbeats_of=[1, 3])
    bench.form()
    _slots(bench, 2)
    bench.wait(0.2, heartbeats_of=[1, 2, 3])
    bench.on(RequestNextWorld(name(1), bench.fence, at(5), planned=True))
    _slots(bench, 4)
    bench.on(RequestNextWorld(name(3), bench.fence, at(5), planned=True))
    assert bench.members() == [name(1), name(2), name(3), name(4)]
    assert [announce.version for announce in bench.find_commands(AnnounceChange)] == [ONE_JOINS]


@pytest.mark.scenario("U1")
def test_worker_notification_manager_notifications_without_assignments() -> None:
    """A change before there is a world, or of hosts that the job does not need, announces nothing."""
    bench = _bench(max_workers=2, num_workers=2)
    bench.on(on.HostsDiscovered(0, TWO_HOSTS[:1]))
    bench.on(on.HostsDiscovered(0, TWO_HOSTS))
    _slots(bench, 1, 2)
    bench.form()
    bench.on(on.HostsDiscovered(0, (*TWO_HOSTS, ("host-3", 2))))
    bench.on(on.HostsDiscovered(0, TWO_HOSTS[:1]))
    bench.wait(1.0, heartbeats_of=[1, 2])
    assert not bench.find_commands(AnnounceChange)


@pytest.mark.scenario("U1")
def test_order_available_hosts() -> None:
    """The oldest come first, whatever the order of the listing."""
    bench = _bench(num_workers=2, gather_timeout=1.0)
    _slots(bench, 3, 4)
    bench.form()
    bench.on(on.HostsDiscovered(0, tuple(reversed(TWO_HOSTS))))
    _slots(bench, 1, 2)
    bench.wait(0.2, heartbeats_of=[1, 2, 3, 4])
    bench.stop_planned(5, name(3), name(4))
    assert bench.members() == [name(3), name(4), name(1), name(2)]


@pytest.mark.scenario("U1")
def test_update_available_hosts() -> None:
    bench = _bench()
    _slots(bench, 1, 2, 3, 4)
    bench.form()
    bench.on(on.HostsDiscovered(0, (("host-1", 1), ("host-2", 2))))  # a slot fewer
    bench.wait(0.2, heartbeats_of=[1, 2, 3, 4])
    bench.stop_planned(5, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(1), name(3), name(4)]
    assert not bench.find_commands(AbortWorld)


@pytest.mark.scenario("U1")
def test_blacklist_host() -> None:
    bench = _bench(cooldown_range=(20.0, 60.0))
    _slots(bench, 1, 2, 3, 4)
    bench.form()
    for job in (1, 2):
        bench.exit(name(job), 1)
        bench.on(on.LaunchEnded(0, job, "released"))
    for job in (5, 6):
        bench.on(RegisterSlot(SlotId(f"{job}-0"), "host-1", job))
    assert not {"5-0", "6-0"} & set(bench.state.slots)
    bench.regroup(3, name(3), name(4))
    assert bench.members() == [name(3), name(4)]
    assert not bench.find_commands(StopWorker)
