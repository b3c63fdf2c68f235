from __future__ import annotations

from dataclasses import replace

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import End, JobOutcome, LaunchSlot, NotifyUser, ReleaseSlot
from spark_elastic.protocol.messages import RegisterSlot, WorkerExited, WorkerStarted
from spark_elastic.protocol.types import Limits, SlotId, WorkerId
from tests.unit.protocol.driver_bench import Bench, at, name

# ---- launches


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        (False, [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]),  # later and later
        (True, [0.0] * 5),
    ],
)
def test_a_slot_job_that_had_worked_is_launched_again_at_once(works: bool, expected: list[float]) -> None:
    bench = Bench(max_workers=1, num_workers=1)
    delays = []
    for job in range(1, len(expected) + 1):
        if works:
            bench.start_warm(job)
        bench.on(on.LaunchEnded(0, job, "no room"))
        ended = bench.now
        while bench.find_commands(LaunchSlot)[-1].launch == job:
            bench.wait(0.05)
        delays.append(bench.now - ended)
    assert [launch.launch for launch in bench.find_commands(LaunchSlot)] == list(range(1, len(expected) + 2))
    assert delays == pytest.approx(expected, abs=0.06)


def test_slots_that_all_have_another_release_end_the_job_with_its_sentence() -> None:
    refused = "Request /slots/register was refused: it speaks version 3 and the driver speaks 4: install one release"
    bench = Bench(start_timeout=600.0)
    for number in range(1, 14):
        bench.on(on.LaunchEnded(0, number, f"slot launch {number} ended: {refused}"))
        bench.wait(1.0)
        if number == 6:
            bench.on(RegisterSlot(SlotId("7-0"), "h7", 7))
            bench.wait(10.0, heartbeats_of=[7])
            notice = bench.find_commands(NotifyUser)[-1].reason
            assert notice.endswith(
                f"the last slot that ended before its worker was warm said: slot launch 6 ended: {refused}"
            )
            assert not bench.find_commands(End)
    bench.check_end(
        JobOutcome.NOT_ENOUGH_WORKERS, "slots have another release of spark_elastic than the driver", refused
    )


def _count_launches(bench: Bench, seconds: float, host: str) -> int:
    """How many slot jobs a host is asked for that takes each at once and may not be used."""
    before, end = len(bench.find_commands(LaunchSlot)), bench.now + seconds
    while bench.now < end:
        for job in tuple(bench.state.launches):
            if job not in bench.state.launches.delayed:
                bench.on(RegisterSlot(SlotId(f"{job}-0"), host, job))
                bench.on(on.LaunchEnded(0, job, "released"))
        bench.wait(0.5)
    return len(bench.find_commands(LaunchSlot)) - before


def test_a_host_that_is_listed_again_does_not_wait_for_delayed_launches() -> None:
    bench = Bench(num_workers=1, max_workers=1, start_timeout=3600.0)
    bench.on(on.HostsDiscovered(0, (("h2", 1),)))
    _count_launches(bench, 130.0, "h1")
    (job,) = bench.state.launches.delayed
    bench.on(on.HostsDiscovered(0, (("h1", 1), ("h2", 1))))
    assert bench.commands == (bench.find_commands(LaunchSlot)[-1],)
    assert bench.find_commands(LaunchSlot)[-1].launch == job


def test_a_new_host_gets_a_launch_at_once_and_then_as_many_as_others() -> None:
    bench = Bench(num_workers=1, max_workers=1, start_timeout=3600.0)
    bench.on(on.DrainRequested(0, "maintenance", host="h1"))
    _count_launches(bench, 130.0, "h1")
    (job,) = bench.state.launches.delayed
    bench.on(on.HostAppeared(0, "h2"))
    assert [command.launch for command in bench.commands if isinstance(command, LaunchSlot)] == [job]
    assert _count_launches(bench, 120.0, "h1") <= 5


# ---- idle slots


def test_w19_a_slot_that_no_world_needs_gives_its_core_back_until_a_member_is_lost() -> None:
    bench = Bench.running(1, 2, 3, max_global_batch=3, idle_slot_timeout=20.0)
    bench.start_warm(4)
    bench.wait(15.0, heartbeats_of=[1, 2, 3, 4])
    assert not bench.released
    bench.wait(6.0, heartbeats_of=[1, 2, 3, 4])
    assert bench.released == ["4-0"]
    bench.on(on.LaunchEnded(0, 4, "released"))
    assert len(bench.find_commands(LaunchSlot)) == 4
    bench.exit(name(1), -9)
    assert len(bench.find_commands(LaunchSlot)) == 5


def test_r14_an_idle_second_attempt_is_not_released_before_the_first() -> None:
    bench = Bench.running(1, 2, max_workers=2, num_workers=2, idle_slot_timeout=2.0)
    bench.copy(1)
    bench.wait(5.0, heartbeats_of=[1, 2, "1-1"])
    assert not bench.released


def _start_copied() -> Bench:
    """A world of two; the task of its first slot has a second attempt."""
    bench = Bench.running(1, 2, limits=Limits(2, 1, 3))
    bench.copy(1)
    return bench


ORDERS = (
    on.DrainRequested(0, "decommissioned", host="h9"),
    on.DrainRequested(0, "wanted elsewhere", worker=WorkerId("1-1.1")),
    on.HostsDiscovered(0, (("h1", 1), ("h2", 1))),
)


@pytest.mark.parametrize("order", ORDERS, ids=["host drains", "drained by hand", "not listed"])
def test_r14_a_second_attempt_is_released_once_the_first_is_gone(order: on.DriverEvent) -> None:
    bench = _start_copied()
    bench.on(order)
    bench.wait(2.0, heartbeats_of=[1, 2])
    assert not bench.released, "Spark would end the member"
    bench.stop_planned(1, name(1), name(2))  # announced when it came
    assert bench.members() == [name(1), name(2)]
    bench.on(on.HostLost(0, "h1", "executor lost"))
    assert bench.released == ["1-1"]
    assert not bench.state.slots.excluded


def test_r14_a_second_attempt_that_is_not_admitted_waits_for_the_end_of_its_launch() -> None:
    bench = Bench.running(1, 2, limits=Limits(2, 1, 3))
    bench.on(on.HostsDiscovered(0, (("h1", 1), ("h2", 1))))
    bench.copy(1)
    bench.on(RegisterSlot(SlotId("3-0"), "h9", 3))
    assert bench.released == ["3-0"], "that one is alone"
    bench.on(on.LaunchEnded(0, 1, "killed"))
    assert bench.released == ["3-0"]
    assert bench.find_commands(LaunchSlot)[-1].launch == 4
    assert not bench.state.slots.excluded


def test_r14_an_attempt_on_an_unfit_host_waits_beside_another_and_is_released_alone() -> None:
    bench = Bench.running(1, 2, limits=Limits(2, 1, 3))
    bench.on(RegisterSlot(SlotId("1-1"), "h9", 1, unfit="host h9 has no torch"))
    bench.on(RegisterSlot(SlotId("3-0"), "h9", 3, unfit="host h9 has no torch"))
    assert bench.find_commands(ReleaseSlot) == [ReleaseSlot("host h9 has no torch", SlotId("3-0"))]
    bench.on(on.HostsDiscovered(0, (("h1", 1), ("h2", 1), ("h9", 2))))
    bench.on(on.HostLost(0, "h1", "executor lost"))
    assert bench.find_commands(ReleaseSlot)[-1] == ReleaseSlot("host h9 has no torch", SlotId("1-1"))


def test_r14_a_second_attempt_is_admitted_once_discovery_lists_its_host() -> None:
    bench = _start_copied()
    bench.stop_planned(1, name(1), name(2))
    bench.form()
    bench.on(on.HostsDiscovered(0, (("h1", 1), ("h2", 1))))
    bench.change_world(2)
    assert bench.members() == [name(1), name(2)]
    bench.restart(WorkerId("1-1.2"))
    bench.form()
    assert set(bench.state.slots.excluded) == {"1-1"}
    bench.on(on.HostsDiscovered(0, (("h1", 1), ("h2", 1), ("h9", 1))))
    bench.change_world(3)
    assert bench.members() == [name(1), name(2), "1-1.2"]


def test_r14_a_second_attempt_is_admitted_once_its_hosts_cooldown_is_over() -> None:
    bench = Bench.running(1, 2, limits=replace(Limits(2, 1, 3), cooldown_range=(20.0, 20.0)))
    bench.slot(3, "h9")
    bench.exit(name(3), 1)
    bench.copy(1)
    assert set(bench.state.slots.excluded) == {"1-1"}
    bench.wait(21.0 - bench.now, heartbeats_of=[1, 2, "1-1"])
    bench.stop_planned(1, name(1), name(2))
    assert bench.members() == [name(1), name(2), "1-1.1"]


def test_r14_a_member_that_drains_does_not_take_its_other_attempt_along() -> None:
    bench = _start_copied()
    bench.stop_planned(1, name(1), name(2))
    bench.form()
    assert len(bench.members()) == 3
    bench.on(on.DrainRequested(0, "decommissioned", host="h1"))
    bench.change_world(2)
    assert bench.members() == [name(2), "1-1.1"]
    assert not bench.released


def test_r14_all_attempts_are_released_if_none_may_take_part() -> None:
    bench = _start_copied()
    bench.on(on.DrainRequested(0, "decommissioned", host="h9"))
    bench.on(on.DrainRequested(0, "decommissioned", host="h1"))
    bench.change_world(2)
    bench.on(on.Tick(0))
    assert set(bench.released) == {"1-0", "1-1"}


def test_r14_crashes_of_an_attempt_that_takes_no_part_cost_nothing() -> None:
    bench = _start_copied()
    bench.on(on.DrainRequested(0, "decommissioned", host="h9"))
    for started in range(1, 30):
        bench.on(WorkerExited(SlotId("1-1"), WorkerId(f"1-1.{started}"), 1, out_of_memory=started % 2 == 0))
        bench.on(WorkerStarted(SlotId("1-1"), WorkerId(f"1-1.{started + 1}")))
    assert not bench.state.failures.records
    assert not bench.state.failures.oom_kills
    assert not bench.find_commands(End)


# ---- other jobs of the application


def test_r17_without_a_world_the_slots_go_to_the_job_that_lacks_them() -> None:
    bench = Bench(min_workers=4)
    bench.start_warm(1, 2)
    bench.on(RegisterSlot(SlotId("1-1"), "h9", 1))
    bench.on(on.SlotsWanted(0, "another fit"))
    assert set(bench.released) == {"1-0", "1-1", "2-0"}
    bench.on(on.LaunchEnded(0, 1, "released"))
    bench.wait(3.9)
    assert len(bench.find_commands(LaunchSlot)) == 4
    bench.wait(0.2)
    assert len(bench.find_commands(LaunchSlot)) == 5
    bench.wait(bench.limits.start_timeout + 1.0)
    assert "given back in between: another fit" in bench.end.reason, "the reason must name the other job"


@pytest.mark.parametrize("trains", [False, True])
def test_r17_slots_of_a_job_that_trains_are_not_missing(trains: bool) -> None:
    bench = Bench(min_workers=3)
    bench.start_warm(1, 2)
    bench.wait(bench.limits.start_timeout - 1.0)
    if trains:
        bench.on(on.SlotsWanted(0, "another fit"))
    bench.wait(2.0)
    assert bool(bench.find_commands(End)) is not trains


def test_r17_slots_whose_workers_still_import_are_enough_to_begin() -> None:
    """Were they given back every `gather_timeout`, no import that takes longer would ever end."""
    bench = Bench(Limits(2, 2, 2, start_timeout=60.0))
    bench.slot(1)
    bench.slot(2)
    for _ in range(3):
        bench.on(on.SlotsWanted(0, "another fit"))
        bench.wait(10.0, heartbeats_of=[1, 2])
    assert not bench.released
    assert not bench.find_commands(End)
    bench.on(on.SlotsWanted(0, "another fit"))
    bench.wait(31.0, heartbeats_of=[1, 2])
    assert bench.end.outcome is JobOutcome.NOT_ENOUGH_WORKERS  # no other job is why its workers are not warm


def test_r14_r17_another_attempt_of_the_survivor_that_stays_is_not_released() -> None:
    bench = Bench.running(1, 2, 3, num_workers=3, min_workers=3, max_workers=3)
    for job in (2, 3):
        bench.on(on.LaunchEnded(0, job, "executor lost", executor_lost=True))
    bench.join(name(1), bench.fence, at(7))
    bench.on(RegisterSlot(SlotId("1-1"), "h9", 1))
    bench.on(on.SlotsWanted(0, "another fit"))
    assert "1-1" not in set(bench.released)


def test_r17_a_survivor_that_does_not_drain_keeps_its_slot() -> None:
    bench = Bench.running(1, 2, 3, num_workers=3, min_workers=3, max_workers=3)
    bench.on(on.DrainRequested(0, "decommissioned", host="h1"))
    bench.on(on.LaunchEnded(0, 3, "executor lost", executor_lost=True))
    bench.join(name(1), bench.fence, at(7))
    bench.join(name(2), bench.fence, at(7))
    bench.on(on.SlotsWanted(0, "another fit"))
    assert set(bench.state.slots) == {"2-0"}


def test_r17_a_world_keeps_its_slots() -> None:
    bench = Bench.running(1, 2, 3, 4)
    bench.on(on.SlotsWanted(0, "another fit"))
    assert not bench.released


def test_r18_a_released_slot_may_live_until_its_launch_is_over() -> None:
    """The next world without survivors waits for that."""
    bench = Bench.running(1, 2, num_workers=2, max_workers=2)
    bench.on(on.ConnectionLost(0, SlotId("2-0"), name(2)))
    bench.join(name(1), bench.fence, at(3), suspects=(name(2),))
    bench.on(on.HostsDiscovered(0, (("h1", 1),)))
    assert set(bench.state.slots) == {"1-0"}
    assert set(bench.state.possibly_alive.members) == {name(2)}
    bench.on(on.LaunchEnded(0, 2, "released"))
    assert not bench.state.possibly_alive.members
