from __future__ import annotations

from dataclasses import replace

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import (
    AbortWorld,
    AnnounceChange,
    LaunchSlot,
    NotifyUser,
    PublishWorld,
    ReleaseSlot,
)
from spark_elastic.protocol.messages import RegisterSlot, WorkerExited, WorkerStarted
from spark_elastic.protocol.types import HostUpdateResult, SlotId
from tests.unit.protocol.driver_bench import FOUR, Bench, name

ALL = (("h1", 1), ("h2", 1), ("h3", 1), ("h4", 1))


def _list(bench: Bench, *hosts: tuple[str, int]) -> None:
    bench.on(on.HostsDiscovered(0, hosts))


def _start_running(limits: object = None) -> Bench:
    bench = Bench() if limits is None else Bench(limits)  # type: ignore[arg-type]
    _list(bench, *ALL)
    bench.start(1, 2, 3, 4)
    return bench


def test_a_host_that_discovery_does_not_list_gets_no_slot() -> None:
    bench = Bench()
    _list(bench, ("h1", 1))
    bench.slot(1)
    bench.slot(2)
    assert set(bench.state.slots) == {"1-0"}
    assert "not among those" in bench.find_commands(ReleaseSlot)[0].reason


@pytest.mark.scenario("U3")
def test_a_host_gets_no_more_slots_than_discovery_lists() -> None:
    bench = Bench()
    _list(bench, ("big", 2))
    for job in (1, 2, 3):
        bench.slot(job, "big")
    assert set(bench.state.slots) == {"1-0", "2-0"}


def test_discovery_may_list_a_host_by_its_machines_name() -> None:
    bench = Bench()
    _list(bench, ("node1.cluster", 1))
    bench.on(RegisterSlot(SlotId("1-0"), "executor 7", 1, "node1.cluster"))
    bench.on(RegisterSlot(SlotId("2-0"), "executor 8", 2, "node1.cluster"))
    assert set(bench.state.slots) == {"1-0"}


@pytest.mark.scenario("U3")
def test_a_member_on_a_host_that_discovery_removes_leaves_at_a_boundary_and_nothing_is_aborted() -> None:
    bench = _start_running()
    _list(bench, *ALL[1:])
    bench.wait(0.2, heartbeats_of=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(2), name(3), name(4)]
    assert bench.world.source == 0
    assert not bench.find_commands(AbortWorld)
    assert [release.slot for release in bench.find_commands(ReleaseSlot)] == ["1-0"]
    assert bench.state.current.version.update == HostUpdateResult.removed
    bench.on(on.LaunchEnded(0, 1, "released"))
    assert bench.find_commands(LaunchSlot)[-1].launch == 5  # another host may have room


def test_the_newest_slots_of_a_host_leave_if_discovery_lists_fewer() -> None:
    bench = Bench()
    _list(bench, ("big", 4))
    for job in (1, 2, 3, 4):
        bench.slot(job, "big")
        bench.join(name(job))
    bench.form()
    _list(bench, ("big", 3))
    bench.wait(0.2, heartbeats_of=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(1), name(2), name(3)]


def test_w15_a_host_that_is_removed_and_listed_again_within_the_debounce_changes_nothing() -> None:
    bench = _start_running(replace(FOUR, debounce=0.2))
    _list(bench, *ALL[1:])
    bench.wait(0.1, heartbeats_of=[1, 2, 3, 4])
    _list(bench, *ALL)
    bench.wait(1.0, heartbeats_of=[1, 2, 3, 4])
    assert not bench.find_commands(AnnounceChange)
    assert not bench.state.workers.draining


def test_w15_a_host_that_is_added_and_removed_within_the_debounce_changes_nothing() -> None:
    bench = Bench(replace(FOUR, debounce=0.2))
    _list(bench, *ALL[:2])
    bench.start(1, 2)
    _list(bench, *ALL[:3])
    bench.start_warm(3)
    bench.wait(0.1, heartbeats_of=[1, 2, 3])
    _list(bench, *ALL[:2])
    bench.wait(1.0, heartbeats_of=[1, 2])
    assert not bench.find_commands(AnnounceChange)
    assert "3-0" in {release.slot for release in bench.find_commands(ReleaseSlot)}


@pytest.mark.scenario("U3")
def test_hosts_that_are_not_needed_come_and_go_without_a_reset() -> None:
    bench = Bench(replace(FOUR, max_workers=2, num_workers=2))
    _list(bench, *ALL[:2])
    bench.start(1, 2)
    _list(bench, *ALL)
    bench.wait(1.0, heartbeats_of=[1, 2])
    _list(bench, *ALL[:2])
    bench.wait(1.0, heartbeats_of=[1, 2])
    assert not bench.find_commands(AnnounceChange)
    assert len(bench.find_commands(PublishWorld)) == 1


def test_every_host_is_admitted_once_discovery_lists_none_any_more() -> None:
    bench = Bench()
    _list(bench, ("h1", 1))
    bench.on(on.HostsDiscovered(0, None))
    bench.slot(2)
    assert "2-0" in bench.state.slots


# ---- drains


@pytest.mark.parametrize("target", [{"rank": 1}, {"worker": name(2)}])
def test_w26_a_drained_workers_slot_is_asked_for_again_once_a_member_is_lost(
    target: dict[str, object],
) -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", **target))  # type: ignore[arg-type]
    bench.wait(0.2, heartbeats_of=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(1), name(3), name(4)]
    bench.on(on.LaunchEnded(0, 2, "released"))
    bench.form()
    assert len(bench.find_commands(LaunchSlot)) == 4
    bench.on(WorkerExited(name(3).slot, name(3), -9))
    assert len(bench.find_commands(LaunchSlot)) == 5


def test_w26_a_drained_worker_that_dies_first_is_not_followed_by_its_spare() -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", worker=name(2)))
    bench.on(WorkerExited(name(2).slot, name(2), -9))
    bench.on(WorkerStarted(SlotId("2-0"), name(2, 2)))
    bench.join(name(2, 2))
    bench.regroup(3, name(1), name(3), name(4))
    assert bench.members() == [name(1), name(3), name(4)]
    assert "2-0" in {release.slot for release in bench.find_commands(ReleaseSlot)}


def test_a_released_slot_is_launched_again_below_min_workers() -> None:
    bench = Bench(replace(FOUR, min_workers=2, max_workers=2, num_workers=2))
    bench.start(1, 2)
    bench.on(on.DrainRequested(0, "wanted elsewhere", worker=name(2)))
    bench.on(WorkerExited(name(2).slot, name(2), -9))
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
    bench.wait(0.2, heartbeats_of=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
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
    bench.wait(0.2, heartbeats_of=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(1), name(3), name(4)]
    assert not bench.find_commands(NotifyUser)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"rank": 4}, "rank 4 does not live in world 1 of 4 workers"),
        ({"worker": "9-0.1"}, "worker 9-0.1 is not alive"),
        ({"host": "h99"}, "no slot is on host h99"),
    ],
)
def test_the_user_is_notified_of_a_drain_that_matches_no_worker(order: dict[str, object], said: str) -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", by_user=True, **order))  # type: ignore[arg-type]
    (remark,) = bench.find_commands(NotifyUser)
    assert said in remark.reason
    assert "wanted elsewhere" in remark.reason
    assert not bench.state.workers.draining


def test_spark_decommissions_executors_that_this_job_has_no_slot_on() -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "executor 9 is being decommissioned", host="9"))
    assert not bench.find_commands(NotifyUser)
