"""Which slots may take part: hosts that discovery lists, drains, and members without which the others are quicker."""

from __future__ import annotations

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import AbortWorld, AnnounceChange, LaunchSlot, NotifyUser, ReleaseSlot
from spark_elastic.protocol.messages import RegisterSlot, WorkerExited, WorkerStraggles
from spark_elastic.protocol.types import Fence, HostUpdateResult, SlotId, WorkerId
from tests.unit.protocol.driver_bench import Bench, name

ALL = (("h1", 1), ("h2", 1), ("h3", 1), ("h4", 1))


def _list(bench: Bench, *hosts: tuple[str, int]) -> None:
    bench.on(on.HostsDiscovered(0, hosts))


@pytest.mark.scenario("U1")
@pytest.mark.scenario("U3")
def test_a_member_on_a_host_that_discovery_removes_leaves_at_a_boundary_and_nothing_is_aborted() -> None:
    bench = Bench()
    _list(bench, *ALL)
    bench.start(1, 2, 3, 4)
    _list(bench, *ALL[1:])
    bench.change_world(6)
    assert bench.members() == [name(2), name(3), name(4)]
    assert bench.world.source == 0
    assert not bench.find_commands(AbortWorld)
    assert bench.released == ["1-0"]
    assert bench.state.current.version.update == HostUpdateResult.removed
    bench.on(on.LaunchEnded(0, 1, "released"))
    assert bench.find_commands(LaunchSlot)[-1].launch == 5  # another host may have room


def test_a_host_that_discovery_does_not_list_gets_no_slot_until_it_lists_none_any_more() -> None:
    bench = Bench()
    _list(bench, ("h1", 1))
    bench.slot(1)
    bench.slot(2)
    assert set(bench.state.slots) == {"1-0"}
    assert "not among those" in bench.find_commands(ReleaseSlot)[0].reason
    bench.on(on.HostsDiscovered(0, None))
    bench.slot(3)
    assert "3-0" in bench.state.slots


@pytest.mark.scenario("U3")
def test_a_host_gets_no_more_slots_than_discovery_lists_by_its_or_its_machines_name() -> None:
    bench = Bench()
    _list(bench, ("node1.cluster", 1))  # one slot, and no more
    bench.on(RegisterSlot(SlotId("1-0"), "executor 7", 1, "node1.cluster"))
    bench.on(RegisterSlot(SlotId("2-0"), "executor 8", 2, "node1.cluster"))
    assert set(bench.state.slots) == {"1-0"}


@pytest.mark.parametrize(("listed", "meanwhile"), [(ALL, ALL[1:]), (ALL[:2], ALL[:3])])
def test_w15_a_list_of_hosts_that_is_back_within_the_debounce_changes_nothing(
    listed: tuple[tuple[str, int], ...], meanwhile: tuple[tuple[str, int], ...]
) -> None:
    bench = Bench(debounce=0.2)
    _list(bench, *listed)
    bench.start(*range(1, len(listed) + 1))
    _list(bench, *meanwhile)
    if len(meanwhile) > len(listed):
        bench.start_warm(3)
    bench.wait(0.1, heartbeats_of=[1, 2, 3, 4])
    _list(bench, *listed)
    bench.wait(1.0, heartbeats_of=[1, 2, 3, 4])
    assert not bench.find_commands(AnnounceChange)
    assert not bench.state.workers.draining
    assert ("3-0" in bench.released) == (len(meanwhile) > len(listed))


# ---- drains


@pytest.mark.parametrize("target", [{"rank": 1}, {"worker": name(2)}])
def test_w26_a_drained_workers_slot_is_asked_for_after_a_loss(target: dict[str, object]) -> None:
    bench = Bench.running(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", **target))  # type: ignore[arg-type]
    bench.change_world(6)
    assert bench.members() == [name(1), name(3), name(4)]
    bench.on(on.LaunchEnded(0, 2, "released"))
    bench.form()
    assert len(bench.find_commands(LaunchSlot)) == 4
    bench.exit(name(3), -9)
    assert len(bench.find_commands(LaunchSlot)) == 5


def test_w26_a_drained_worker_that_dies_first_is_not_followed_by_its_spare() -> None:
    bench = Bench.running(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", worker=name(2)))
    bench.exit(name(2), -9)
    bench.restart(name(2, 2))
    bench.regroup(3, name(1), name(3), name(4))
    assert bench.members() == [name(1), name(3), name(4)]
    assert "2-0" in set(bench.released)


def test_a_released_slot_is_launched_again_below_min_workers() -> None:
    bench = Bench.running(1, 2, min_workers=2, max_workers=2, num_workers=2)
    bench.on(on.DrainRequested(0, "wanted elsewhere", worker=name(2)))
    bench.exit(name(2), -9)
    bench.on(on.LaunchEnded(0, 2, "released"))
    bench.regroup(3, name(1))
    bench.on(on.Tick(0))
    assert len(bench.find_commands(LaunchSlot)) == 3


def test_a_drained_machine_takes_all_its_executors_along_and_takes_no_other() -> None:
    bench = Bench()
    for job in (1, 2, 3, 4):
        bench.on(RegisterSlot(SlotId(f"{job}-0"), f"executor {job}", job, "left" if job < 3 else "right"))
        bench.join(name(job))
    bench.form()
    bench.on(on.DrainRequested(0, "maintenance", host="left"))
    bench.change_world(6)
    assert bench.members() == [name(3), name(4)]
    bench.on(on.LaunchEnded(0, 1, "released"))
    bench.on(RegisterSlot(SlotId("5-0"), "executor 9", 5, "left"))
    assert "5-0" not in bench.state.slots


@pytest.mark.parametrize("order", [{"rank": 1}, {"worker": name(2)}])
def test_a_drain_before_the_first_world_is_carried_out_in_it(order: dict[str, object]) -> None:
    bench = Bench()
    bench.on(on.DrainRequested(0, "wanted elsewhere", by_user=True, **order))  # type: ignore[arg-type]
    bench.start(1, 2, 3, 4)
    assert bench.members() == [name(job) for job in (1, 2, 3, 4)]
    bench.change_world(6)
    assert bench.members() == [name(1), name(3), name(4)]
    assert not bench.find_commands(NotifyUser)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"rank": 4}, "rank 4 does not live in world 1 of 4 workers"),
        ({"worker": "9-0.1"}, "worker 9-0.1 is not alive"),
        ({"host": "h99"}, "no slot is on host h99"),
        ({"rank": 1}, "a drain waits until others join (wanted elsewhere): only 3 of 4 workers would stay"),
        ({"host": "9"}, None),  # Spark decommissions executors that this job has no slot on
    ],
)
def test_a_drain_that_is_not_done_is_reported(order: dict[str, object], said: str | None) -> None:
    bench = Bench.running(1, 2, 3, 4, min_workers=4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", by_user=said is not None, **order))  # type: ignore[arg-type]
    reasons = [each.reason for each in bench.find_commands(NotifyUser)]
    assert len(reasons) == (said is not None)
    assert all(said in reason and "wanted elsewhere" in reason for reason in reasons)  # type: ignore[operator]
    assert bool(bench.state.workers.draining) is ("rank" in order and order["rank"] == 1)


# ---- stragglers

JOBS = (1, 2, 3, 4)
SPARE = name(2, 2)


def exchange(bench: Bench, straggler: WorkerId, step: int) -> None:
    bench.on(WorkerStraggles(straggler, bench.fence, "it is slow"))
    bench.change_world(step)


def let_spare_join(bench: Bench) -> None:
    bench.on(WorkerExited(SlotId("2-0"), name(2), 0))
    bench.restart(SPARE)
    bench.form()
    bench.change_world(9)
    bench.form()


def test_a_slot_whose_second_worker_is_a_straggler_too_is_exchanged_and_its_host_cools_down() -> None:
    bench = Bench.running(*JOBS)
    exchange(bench, name(2), 6)
    let_spare_join(bench)
    exchange(bench, SPARE, 12)
    assert bench.members() == [name(1), name(3), name(4)]
    assert bench.released == ["2-0"]
    assert bench.state.blacklist.find_host_return("h2", bench.now) is not None
    bench.on(on.LaunchEnded(0, 2, "released"))
    bench.wait(70.0, heartbeats_of=JOBS)
    assert len(bench.find_commands(LaunchSlot)) == 5


def test_a_straggler_stays_where_the_world_would_be_too_small_without_it() -> None:
    bench = Bench.running(*JOBS, min_workers=4)
    bench.on(WorkerStraggles(name(2), bench.fence, "it is slow"))
    bench.on(WorkerStraggles(name(2), Fence(1, bench.fence.generation - 1), "it was slow"))
    bench.wait(1.0, heartbeats_of=JOBS)
    assert not bench.find_commands(AnnounceChange)
