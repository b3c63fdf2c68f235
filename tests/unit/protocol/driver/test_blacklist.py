from __future__ import annotations

import math
from typing import Any

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import End, JobOutcome, LaunchSlot, PublishWorld, ReleaseSlot
from spark_elastic.protocol.driver.blacklist import JITTER, Blacklist, compute_cooldown
from spark_elastic.protocol.messages import RegisterSlot, WorkerStarted
from spark_elastic.protocol.types import Limits, SlotId
from tests.unit.protocol.driver_bench import Bench, name

RULES = Limits(4, 1, 4, failure_window=100.0, cooldown_range=(2.0, 30.0))


def _fail(blacklist: Blacklist, slot: str, now: float, slots: int = 4) -> Blacklist:
    return blacklist.record_failure(slot, "h", slots, now, RULES)


def test_cooldowns_double_from_the_lower_to_the_upper_limit() -> None:
    delays = [compute_cooldown("h", failures, 2.0, 30.0) for failures in range(1, 9)]
    assert delays[0] == 2.0
    for count, seconds in enumerate(delays):
        assert min(30.0, 2.0 * 2**count) <= seconds <= min(30.0, 2.0 * 2**count * (1 + JITTER))
    assert delays[-1] == 30.0
    assert compute_cooldown("h", 3, 2.0, 30.0) == delays[2]
    assert compute_cooldown("g", 3, 2.0, 30.0) != delays[2]
    assert compute_cooldown("h", 10_000, 2.0, 30.0) == 30.0
    assert [compute_cooldown("h", count, math.inf, math.inf) for count in (1, 5)] == [math.inf] * 2


@pytest.mark.parametrize(
    ("succeeded", "after", "failures"), [(True, 103.0, 1), (False, 103.0, 2), (True, 90.0, 2)]
)
def test_failures_are_forgiven_by_success_and_time(succeeded: bool, after: float, failures: int) -> None:
    failed = _fail(Blacklist(), "1-0", 0.0, slots=1)
    if succeeded:
        failed = failed.record_success("1-0", "h")
    assert _fail(failed, "1-0", after, slots=1).hosts["h"].failures == failures


def test_a_slot_that_is_gone_is_forgotten_and_its_host_is_once_it_is_gone_too() -> None:
    failed = _fail(Blacklist(), "1-0", 0.0, slots=1).forget_slot("1-0")
    assert "1-0" not in failed.slots
    assert bool(failed)
    assert failed.find_host_return("h", 1.0) == 2.0
    assert failed.forget_host("g") is failed
    assert not failed.forget_host("h")


# ---- in the machine


@pytest.mark.scenario("U1")
def test_a_host_with_a_long_cooldown_releases_its_slots_and_gets_none() -> None:
    bench = Bench.running(1, 2, 3, 4, cooldown_range=(20.0, 60.0))
    bench.exit(name(2), 3)
    assert bench.released == ["2-0"]
    bench.regroup(3, name(1), name(3), name(4))
    bench.on(on.LaunchEnded(0, 2, "released"))
    bench.on(RegisterSlot(SlotId("5-0"), "h2", 5))
    assert "blacklisted" in bench.find_commands(ReleaseSlot)[-1].reason
    bench.on(on.LaunchEnded(0, 5, "refused"))
    bench.on(RegisterSlot(SlotId("6-0"), "h9", 6))
    assert "6-0" in bench.state.slots
    bench.wait(21.0, heartbeats_of=[1, 3, 4, 6])
    bench.on(on.LaunchEnded(0, 6, "lost"))
    bench.on(RegisterSlot(SlotId("7-0"), "h2", 7))
    assert "7-0" in bench.state.slots


@pytest.mark.scenario("U1")
def test_a_host_two_of_whose_slots_failed_is_given_back_but_for_members_of_the_world() -> None:
    bench = Bench(cooldown_range=(20.0, 60.0))
    for job in (1, 2, 3):
        bench.slot(job, "big")
        bench.join(name(job))
    bench.start_warm(4)
    bench.form()
    bench.exit(name(1), 3)
    assert not bench.released
    bench.exit(name(2), 3)
    assert set(bench.released) == {"1-0", "2-0"}
    assert bench.state.blacklist.find_host_return("big", bench.now) is not None
    bench.regroup(3, name(3), name(4))
    assert bench.members() == [name(3), name(4)]


def test_a_killed_process_counts_as_a_loss_and_not_as_a_crash() -> None:
    """Twenty of each kind must not exhaust a budget of ten; a slot whose worker keeps being killed is to blame."""
    bench = Bench.running(1, 2, 3, 4)
    for number in range(1, 21):
        bench.exit(name(2, number), -9)
        bench.restart(name(2, number + 1))
        bench.regroup(number, name(1), name(3), name(4))
        assert bench.members()[-1] == name(2, number + 1)
        bench.form()
    assert not bench.state.blacklist
    assert not bench.state.failures.records
    bench.exit(name(2, 21), -9)
    assert "21 of its slot ended so within 600 s" in bench.state.failures.records[0].detail
    assert "2-0" in bench.state.blacklist.slots


def test_a_slot_whose_workers_are_killed_before_they_take_part_is_to_blame() -> None:
    bench = Bench(failure_budget=2)
    bench.start_warm(1)
    for number in range(1, 6):
        bench.on(RegisterSlot(SlotId("2-0"), "h2", 2))
        bench.on(WorkerStarted(name(2, number).slot, name(2, number)))
        bench.exit(name(2, number), -9)
        if number == 2:
            assert not bench.state.failures.records
    assert bench.end.outcome is JobOutcome.FAILURE_BUDGET
    assert "ended so in a row before they took part" in bench.end.detail


@pytest.mark.parametrize("machines", [None, (("m1", 2), ("m2", 1))])
def test_all_hosts_blacklisted_for_longer_than_the_job_waits_end_it_at_once(machines: Any) -> None:
    """Discovery lists machines, and hosts are executors: two on the first, one on the second."""
    bench = Bench(num_workers=3, max_workers=3, start_timeout=600.0, cooldown_range=(math.inf, math.inf))
    bench.on(on.HostsDiscovered(0, machines))
    for job, machine in ((1, "m1"), (2, "m1"), (3, "m2")):
        bench.on(RegisterSlot(SlotId(f"{job}-0"), str(job), job, machine))
        bench.on(WorkerStarted(SlotId(f"{job}-0"), name(job)))
        bench.join(name(job))
    bench.form()
    for job in (1, 2):
        bench.exit(name(job), 3)
    bench.wait(bench.limits.gather_timeout)
    assert not bench.find_commands(End)
    bench.exit(name(3), 3)
    bench.wait(0.1)
    said = "all hosts are blacklisted since their workers failed: 1, 2, 3; the first returns never"
    bench.check_end(JobOutcome.NOT_ENOUGH_WORKERS, said)


@pytest.mark.parametrize("left", ["host", "machine"])
def test_a_host_or_listed_machine_without_a_slot_so_far_is_waited_for(left: str) -> None:
    bench = Bench(num_workers=1, max_workers=1, cooldown_range=(math.inf, math.inf))
    machines = ("m1", "m2") if left == "machine" else ("m1",)
    bench.on(on.HostsDiscovered(0, tuple((machine, 1) for machine in machines)))
    bench.on(RegisterSlot(SlotId("1-0"), "1", 1, "m1"))
    bench.start(1)
    if left == "host":
        bench.on(on.HostAppeared(0, "2"))  # it may be on m1
    bench.exit(name(1), 3)
    bench.wait(1.0)
    assert not bench.find_commands(End)


def test_a_good_host_that_was_lost_is_waited_for_though_all_others_are_blacklisted() -> None:
    bench = Bench.running(1, 2, num_workers=2, max_workers=2, cooldown_range=(math.inf, math.inf))
    bench.exit(name(1), 3)
    bench.regroup(3, name(2))
    bench.form()
    bench.on(on.HostLost(0, "h2", "a spot instance went"))
    bench.on(on.LaunchEnded(0, 2, "its executor was lost"))
    bench.wait(1.0)
    assert not bench.find_commands(End)
    job = bench.find_commands(LaunchSlot)[-1].launch
    bench.on(RegisterSlot(SlotId(f"{job}-0"), "h2", job))
    bench.restart(name(job))
    bench.wait(bench.limits.driver_timeout + 10.0, heartbeats_of=[job])
    assert bench.members() == [name(job)]


def test_all_hosts_blacklisted_for_a_while_are_waited_for() -> None:
    bench = Bench.running(1, num_workers=1, max_workers=1, cooldown_range=(20.0, 60.0))
    bench.exit(name(1), 3)
    bench.on(on.LaunchEnded(0, 1, "released"))
    assert not bench.find_commands(End)
    bench.wait(14.0)
    assert len(bench.find_commands(LaunchSlot)) == 1  # no sooner than it would be let in
    bench.wait(1.5)
    assert len(bench.find_commands(LaunchSlot)) == 2
    bench.on(RegisterSlot(SlotId("2-0"), "h1", 2))
    bench.restart(name(2))
    assert len(bench.find_commands(PublishWorld)) == 1
    bench.wait(5.0, heartbeats_of=[2])
    assert bench.members() == [name(2)]
