from __future__ import annotations

from dataclasses import replace

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import (
    Abort,
    Announce,
    End,
    LaunchSlot,
    Outcome,
    Publish,
    ReleaseSlot,
    Remark,
)
from spark_elastic.protocol.types import Limits
from tests.unit.protocol.driver_bench import FOUR, Bench, at, name

ALL = (("h1", 1), ("h2", 1), ("h3", 1), ("h4", 1))


def _list(bench: Bench, *hosts: tuple[str, int]) -> None:
    bench.on(on.HostsListed(0, hosts))


def _running(limits: object = None) -> Bench:
    bench = Bench() if limits is None else Bench(limits)  # type: ignore[arg-type]
    _list(bench, *ALL)
    bench.start(1, 2, 3, 4)
    return bench


def test_a_host_that_is_not_listed_gets_no_slot() -> None:
    bench = Bench()
    _list(bench, ("h1", 1))
    bench.slot(1)
    bench.slot(2)
    assert set(bench.state.slots) == {"1-0"}
    assert "not among those" in bench.all(ReleaseSlot)[0].reason


@pytest.mark.scenario("U3")
def test_a_host_gets_no_more_slots_than_listed() -> None:
    bench = Bench()
    _list(bench, ("big", 2))
    for job in (1, 2, 3):
        bench.slot(job, "big")
    assert set(bench.state.slots) == {"1-0", "2-0"}


def test_a_host_may_be_listed_by_its_machines_name() -> None:
    bench = Bench()
    _list(bench, ("node1.cluster", 1))
    bench.on(on.SlotRegistered(0, "1-0", "executor 7", 1, "node1.cluster"))
    bench.on(on.SlotRegistered(0, "2-0", "executor 8", 2, "node1.cluster"))
    assert set(bench.state.slots) == {"1-0"}


@pytest.mark.scenario("U3")
def test_who_is_no_longer_listed_leaves_at_a_boundary_and_nothing_is_aborted() -> None:
    bench = _running()
    _list(bench, *ALL[1:])
    bench.wait(0.2, beating=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(2), name(3), name(4)]
    assert bench.world.source == 0
    assert not bench.all(Abort)
    assert [release.slot for release in bench.all(ReleaseSlot)] == ["1-0"]
    assert bench.state.version == 1
    bench.on(on.SlotJobEnded(0, 1, "released"))
    assert bench.all(LaunchSlot)[-1].job == 5  # another host may have room


def test_fewer_slots_of_a_host_send_the_last_comers_away() -> None:
    bench = Bench()
    _list(bench, ("big", 4))
    for job in (1, 2, 3, 4):
        bench.slot(job, "big")
        bench.join(name(job))
    bench.form()
    _list(bench, ("big", 3))
    bench.wait(0.2, beating=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(1), name(2), name(3)]


def test_w15_removed_and_listed_again_within_the_debounce_is_nothing() -> None:
    bench = _running(replace(FOUR, debounce=0.2))
    _list(bench, *ALL[1:])
    bench.wait(0.1, beating=[1, 2, 3, 4])
    _list(bench, *ALL)
    bench.wait(1.0, beating=[1, 2, 3, 4])
    assert not bench.all(Announce)
    assert not bench.state.draining


def test_w15_added_and_removed_within_the_debounce_is_nothing() -> None:
    bench = Bench(replace(FOUR, debounce=0.2))
    _list(bench, *ALL[:2])
    bench.start(1, 2)
    _list(bench, *ALL[:3])
    bench.warm(3)
    bench.wait(0.1, beating=[1, 2, 3])
    _list(bench, *ALL[:2])
    bench.wait(1.0, beating=[1, 2])
    assert not bench.all(Announce)
    assert "3-0" in {release.slot for release in bench.all(ReleaseSlot)}


@pytest.mark.scenario("U3")
def test_hosts_that_are_not_needed_may_come_and_go() -> None:
    bench = Bench(replace(FOUR, max_workers=2, num_workers=2))
    _list(bench, *ALL[:2])
    bench.start(1, 2)
    _list(bench, *ALL)
    bench.wait(1.0, beating=[1, 2])
    _list(bench, *ALL[:2])
    bench.wait(1.0, beating=[1, 2])
    assert not bench.all(Announce)
    assert len(bench.all(Publish)) == 1


def test_no_listing_any_more_lets_everybody_in() -> None:
    bench = Bench()
    _list(bench, ("h1", 1))
    bench.on(on.HostsListed(0, None))
    bench.slot(2)
    assert "2-0" in bench.state.slots


def _free_of_work(bench: Bench, seconds: float, host: str) -> int:
    """How many slot jobs a host is asked for that takes each at once and may not be used."""
    before, end = len(bench.all(LaunchSlot)), bench.now + seconds
    while bench.now < end:
        for job in tuple(bench.state.jobs):
            if job not in bench.state.put_off:
                bench.on(on.SlotRegistered(0, f"{job}-0", host, job))
                bench.on(on.SlotJobEnded(0, job, "released"))
        bench.wait(0.5)
    return len(bench.all(LaunchSlot)) - before


def test_a_host_with_room_that_may_not_be_used_is_asked_less_and_less() -> None:
    bench = Bench(replace(FOUR, num_workers=1, max_workers=1, start_timeout=3600.0))
    bench.on(on.DrainRequested(0, "maintenance", host="h1"))
    assert _free_of_work(bench, 600.0, "h1") < 30


def test_a_host_that_is_listed_again_is_not_kept_waiting_by_the_jobs_that_it_refused() -> None:
    bench = Bench(replace(FOUR, num_workers=1, max_workers=1, start_timeout=3600.0))
    _list(bench, ("h2", 1))
    _free_of_work(bench, 130.0, "h1")
    (job,) = bench.state.put_off
    _list(bench, ("h1", 1), ("h2", 1))
    assert bench.commands == (bench.all(LaunchSlot)[-1],)
    assert bench.all(LaunchSlot)[-1].job == job


# ---- drains


@pytest.mark.parametrize("target", [{"rank": 1}, {"worker": name(2)}])
def test_w26_a_drained_workers_slot_is_asked_for_again_once_a_member_is_lost(
    target: dict[str, object],
) -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", **target))  # type: ignore[arg-type]
    bench.wait(0.2, beating=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(1), name(3), name(4)]
    bench.on(on.SlotJobEnded(0, 2, "released"))
    bench.form()
    assert len(bench.all(LaunchSlot)) == 4
    bench.on(on.WorkerExited(0, name(3), -9))
    assert len(bench.all(LaunchSlot)) == 5


def test_w26_a_drained_worker_that_dies_first_is_not_followed_by_its_spare() -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", worker=name(2)))
    bench.on(on.WorkerExited(0, name(2), -9))
    bench.on(on.WorkerStarted(0, "2-0", name(2, 2)))
    bench.join(name(2, 2))
    bench.regroup(3, name(1), name(3), name(4))
    assert bench.members() == [name(1), name(3), name(4)]
    assert "2-0" in {release.slot for release in bench.all(ReleaseSlot)}


def test_what_was_given_back_is_asked_for_again_below_min_workers() -> None:
    bench = Bench(replace(FOUR, min_workers=2, max_workers=2, num_workers=2))
    bench.start(1, 2)
    bench.on(on.DrainRequested(0, "wanted elsewhere", worker=name(2)))
    bench.on(on.WorkerExited(0, name(2), -9))
    bench.on(on.SlotJobEnded(0, 2, "released"))
    bench.regroup(3, name(1))
    bench.on(on.Tick(0))
    assert len(bench.all(LaunchSlot)) == 3


def test_a_drained_machine_takes_all_its_executors_along_and_takes_no_other() -> None:
    bench = Bench()
    for job in (1, 2, 3, 4):
        bench.on(on.SlotRegistered(0, f"{job}-0", f"executor {job}", job, "left" if job < 3 else "right"))
        bench.join(name(job))
    bench.form()
    bench.on(on.DrainRequested(0, "maintenance", host="left"))
    bench.wait(0.2, beating=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(3), name(4)]
    bench.on(on.SlotJobEnded(0, 1, "released"))
    bench.on(on.SlotRegistered(0, "5-0", "executor 9", 5, "left"))
    assert "5-0" not in bench.state.slots


@pytest.mark.parametrize("order", [{"rank": 1}, {"worker": name(2)}])
def test_a_drain_before_the_first_world_is_carried_out_in_it(order: dict[str, object]) -> None:
    bench = Bench()
    bench.on(on.DrainRequested(0, "wanted elsewhere", by_hand=True, **order))  # type: ignore[arg-type]
    bench.start(1, 2, 3, 4)
    assert bench.members() == [name(job) for job in (1, 2, 3, 4)]
    bench.wait(0.2, beating=[1, 2, 3, 4])
    bench.stop_planned(6, *(name(job) for job in (1, 2, 3, 4)))
    assert bench.members() == [name(1), name(3), name(4)]
    assert not bench.all(Remark)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"rank": 4}, "rank 4 does not live in world 1 of 4 workers"),
        ({"worker": "9-0.1"}, "worker 9-0.1 is not alive"),
        ({"host": "h99"}, "no slot is on host h99"),
    ],
)
def test_a_drain_that_meets_nobody_is_said(order: dict[str, object], said: str) -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "wanted elsewhere", by_hand=True, **order))  # type: ignore[arg-type]
    (remark,) = bench.all(Remark)
    assert said in remark.reason
    assert "wanted elsewhere" in remark.reason
    assert not bench.state.draining


def test_spark_decommissions_executors_that_this_job_has_no_slot_on() -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.DrainRequested(0, "executor 9 is being decommissioned", host="9"))
    assert not bench.all(Remark)


# ---- idle slots


def test_w19_a_slot_that_no_world_needs_gives_its_core_back_until_a_member_is_lost() -> None:
    bench = Bench(replace(FOUR, max_global_batch=3, idle_slot_timeout=20.0))
    bench.start(1, 2, 3)
    bench.warm(4)
    bench.wait(15.0, beating=[1, 2, 3, 4])
    assert not bench.all(ReleaseSlot)
    bench.wait(6.0, beating=[1, 2, 3, 4])
    assert [release.slot for release in bench.all(ReleaseSlot)] == ["4-0"]
    bench.on(on.SlotJobEnded(0, 4, "released"))
    assert len(bench.all(LaunchSlot)) == 4
    bench.on(on.WorkerExited(0, name(1), -9))
    assert len(bench.all(LaunchSlot)) == 5


def test_r14_an_idle_second_attempt_is_not_sent_back_before_the_first() -> None:
    bench = Bench(replace(FOUR, max_workers=2, num_workers=2, idle_slot_timeout=2.0))
    bench.start(1, 2)
    bench.on(on.SlotRegistered(0, "1-1", "h9", 1))
    bench.join("1-1.1")
    for _ in range(10):
        bench.wait(0.5, beating=[1, 2])
        bench.on(on.SlotBeat(0, "1-1", "1-1.1", "S"))
    assert not bench.all(ReleaseSlot)


def _copied(host: str = "h9") -> Bench:
    """A world of two; the task of its first slot has a second attempt on that host, with a warm worker."""
    bench = Bench(Limits(2, 1, 3))
    bench.start(1, 2)
    bench.on(on.SlotRegistered(0, "1-1", host, 1))
    bench.join("1-1.1")
    return bench


ORDERS = (
    on.DrainRequested(0, "decommissioned", host="h9"),
    on.DrainRequested(0, "wanted elsewhere", worker="1-1.1"),
    on.HostsListed(0, (("h1", 1), ("h2", 1))),
)


@pytest.mark.parametrize("order", ORDERS, ids=["host drains", "drained by hand", "not listed"])
def test_r14_a_second_attempt_that_is_not_wanted_is_sent_back_once_the_first_is_gone(
    order: on.DriverEvent,
) -> None:
    bench = _copied()
    bench.on(order)
    bench.wait(2.0, beating=[1, 2])
    assert not bench.all(ReleaseSlot), "Spark would end the member"
    bench.stop_planned(1, name(1), name(2))  # announced when it came
    assert bench.members() == [name(1), name(2)]
    bench.on(on.HostLost(0, "h1", "executor lost"))
    assert [release.slot for release in bench.all(ReleaseSlot)] == ["1-1"]
    assert not bench.state.barred


def test_r14_one_that_is_not_let_in_waits_for_the_end_of_its_job() -> None:
    bench = Bench(Limits(2, 1, 3))
    bench.start(1, 2)
    bench.on(on.HostsListed(0, (("h1", 1), ("h2", 1))))
    bench.on(on.SlotRegistered(0, "1-1", "h9", 1))
    bench.join("1-1.1")
    bench.on(on.SlotRegistered(0, "3-0", "h9", 3))
    assert [release.slot for release in bench.all(ReleaseSlot)] == ["3-0"], "that one is alone"
    bench.on(on.SlotJobEnded(0, 1, "killed"))
    assert [release.slot for release in bench.all(ReleaseSlot)] == ["3-0"]
    assert bench.all(LaunchSlot)[-1].job == 4
    assert not bench.state.barred


def test_r14_a_member_that_drains_does_not_take_its_other_attempt_along() -> None:
    bench = _copied()
    bench.stop_planned(1, name(1), name(2))
    bench.form()
    assert len(bench.members()) == 3
    bench.on(on.DrainRequested(0, "decommissioned", host="h1"))
    bench.wait(0.5, beating=[1, 2])
    bench.stop_planned(2, *bench.members())
    assert bench.members() == [name(2), "1-1.1"]
    assert not bench.all(ReleaseSlot)


def test_r14_attempts_of_which_none_may_take_part_are_all_sent_back() -> None:
    bench = _copied("h9")
    bench.on(on.DrainRequested(0, "decommissioned", host="h9"))
    bench.on(on.DrainRequested(0, "decommissioned", host="h1"))
    bench.wait(0.5, beating=[1, 2])
    bench.stop_planned(2, name(1), name(2))
    bench.on(on.Tick(0))
    assert {release.slot for release in bench.all(ReleaseSlot)} == {"1-0", "1-1"}


def test_r14_crashes_of_an_attempt_that_takes_no_part_cost_nothing() -> None:
    bench = _copied()
    bench.on(on.DrainRequested(0, "decommissioned", host="h9"))
    for started in range(1, 30):
        bench.on(on.WorkerExited(0, f"1-1.{started}", 1, out_of_memory=started % 2 == 0))
        bench.on(on.WorkerStarted(0, "1-1", f"1-1.{started + 1}"))
    assert not bench.state.failures
    assert not bench.state.starved
    assert not bench.all(End)


# ---- other jobs of the application


def test_r17_without_a_world_the_slots_go_to_the_job_that_lacks_them() -> None:
    bench = Bench(replace(FOUR, min_workers=3))
    bench.warm(1, 2)
    bench.on(on.SlotsWanted(0, "another fit"))
    assert {release.slot for release in bench.all(ReleaseSlot)} == {"1-0", "2-0"}
    bench.on(on.SlotJobEnded(0, 1, "released"))
    bench.wait(3.9)
    assert len(bench.all(LaunchSlot)) == 4
    bench.wait(0.2)
    assert len(bench.all(LaunchSlot)) == 5
    bench.wait(bench.limits.start_timeout + 1.0)
    assert "given back in between: another fit" in bench.end.reason, "nobody knows which job was in the way"


@pytest.mark.parametrize("trains", [False, True])
def test_r17_slots_of_a_job_that_trains_are_not_missing(trains: bool) -> None:
    bench = Bench(replace(FOUR, min_workers=3))
    bench.warm(1, 2)
    bench.wait(bench.limits.start_timeout - 1.0)
    if trains:
        bench.on(on.SlotsWanted(0, "another fit"))
    bench.wait(2.0)
    assert bool(bench.all(End)) is not trains


def test_r17_slots_whose_workers_still_import_are_enough_to_begin() -> None:
    """Were they given back every `gather_timeout`, no import that takes longer would ever end."""
    bench = Bench(Limits(2, 2, 2, start_timeout=60.0))
    bench.slot(1)
    bench.slot(2)
    for _ in range(3):
        bench.on(on.SlotsWanted(0, "another fit"))
        bench.wait(10.0, beating=[1, 2])
    assert not bench.all(ReleaseSlot)
    assert not bench.all(End)
    bench.on(on.SlotsWanted(0, "another fit"))
    bench.wait(31.0, beating=[1, 2])
    assert bench.end.outcome is Outcome.NOT_ENOUGH_WORKERS, "no other job is why its workers do not get warm"


def test_r17_a_world_keeps_its_slots() -> None:
    bench = Bench()
    bench.start(1, 2, 3, 4)
    bench.on(on.SlotsWanted(0, "another fit"))
    assert not bench.all(ReleaseSlot)


def test_r18_a_slot_that_was_told_to_end_may_live_until_its_job_is_over() -> None:
    """The next world without survivors waits for that."""
    bench = Bench(replace(FOUR, num_workers=2, max_workers=2))
    bench.start(1, 2)
    bench.on(on.ConnectionLost(0, "2-0", name(2)))
    bench.join(name(1), bench.fence, at(3), suspects=(name(2),))
    bench.on(on.HostsListed(0, (("h1", 1),)))
    assert set(bench.state.slots) == {"1-0"}
    assert set(bench.state.unsure) == {name(2)}
    bench.on(on.SlotJobEnded(0, 2, "released"))
    assert not bench.state.unsure
