"""U1: the unit tests of Horovod's elastic driver, as tests of the machine under their names.

Ten of the fourteen are marked where the rule that they show is tested: `test_rank_and_size`, also with a host that
failed or came, `test_wait_for_available_slots`, `test_wait_for_min_hosts`, `test_all_workers_fail`,
`test_shutdown_on_success`, `test_shutdown_on_initial_discovery_failure`, `test_update_available_hosts` and
`test_blacklist_host`.
"""

from __future__ import annotations

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import AnnounceChange
from spark_elastic.protocol.messages import RequestNextWorld
from spark_elastic.protocol.types import INITIAL_VERSION, HostUpdateResult
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
