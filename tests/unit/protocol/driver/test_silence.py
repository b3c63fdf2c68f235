"""R12 (driver silence): a driver that is cut off from all hosts, or was paused, evicts no worker; one host that is cut
off alone is lost."""

from __future__ import annotations

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import AbortWorld, End, JobOutcome, PublishWorld, ReleaseSlot
from spark_elastic.protocol.messages import Heartbeat, WorkerExited, WorkerStarted
from spark_elastic.protocol.types import DRIVER_SILENT_EXIT_CODE, Limits, SlotId
from tests.unit.protocol.driver_bench import Bench, name

ALL = (1, 2, 3, 4)


def test_r12_heartbeats_that_are_all_missed_at_once_evict_no_worker_until_the_drivers_timeout() -> None:
    bench = Bench.running(*ALL, driver_timeout=40.0)
    for job in ALL:
        bench.wait(0.25)
        bench.on(Heartbeat(SlotId(f"{job}-0"), name(job), "S"))
    bench.wait(30.0)
    assert not bench.find_commands(AbortWorld)
    bench.wait(16.0)
    assert not bench.state.workers


def test_r12_slots_get_a_full_lease_after_the_driver_was_cut_off() -> None:
    bench = Bench.running(*ALL, driver_timeout=40.0)
    bench.wait(30.0)
    bench.wait(4.0, heartbeats_of=(1,))
    assert not bench.find_commands(AbortWorld)
    bench.wait(2.0, heartbeats_of=(1,))
    assert "its slot was silent" in bench.find_commands(AbortWorld)[0].reason
    assert set(bench.state.workers) == {name(1)}


@pytest.mark.parametrize("first", [1, 3])
def test_r12_after_a_pause_one_fresh_heartbeat_proves_nothing_of_other_slots(first: int) -> None:
    """The heartbeats of the others are still unread in its sockets when the first tick comes."""
    bench = Bench.running(*ALL, driver_timeout=40.0)
    bench.wait(1.0, heartbeats_of=ALL)
    bench.now += 10.0
    bench.on(Heartbeat(SlotId(f"{first}-0"), name(first), "S"))
    bench.on(on.Tick(0))
    bench.wait(4.0, heartbeats_of=(first,))
    assert len(bench.state.workers) == 4
    bench.wait(2.0, heartbeats_of=(first,))
    assert set(bench.state.workers) == {name(first)}, "a lease is enough to be seen again"


def test_r12_a_driver_that_slept_lets_a_broken_connection_come_back() -> None:
    bench = Bench.running(*ALL, driver_timeout=40.0)
    bench.wait(1.0, heartbeats_of=ALL)
    bench.on(on.ConnectionLost(0, SlotId("2-0"), name(2)))
    bench.now += 10.0
    bench.on(Heartbeat(SlotId("1-0"), name(1), "S"))
    bench.on(on.Tick(0))
    assert len(bench.state.workers) == 4
    bench.on(on.ConnectionBack(0, SlotId("2-0"), name(2)))
    bench.wait(4.0, heartbeats_of=ALL)
    assert len(bench.state.workers) == 4


def test_r12_a_slot_whose_workers_fall_silent_again_and_again_is_given_back_and_cools_down() -> None:
    bench = Bench.running(*ALL, driver_timeout=40.0)
    for started in (1, 2, 3):
        assert not bench.released
        bench.wait(6.0, heartbeats_of=(1, 2, 3))
        bench.on(WorkerExited(SlotId("4-0"), name(4, started), -9))
        bench.restart(name(4, started + 1))
    (released,) = bench.find_commands(ReleaseSlot)
    assert released.reason == "3 workers of slot 4-0 were evicted within 600 s because they were silent"
    assert bench.state.blacklist.find_host_return("h4", bench.now) is not None
    assert set(bench.state.workers) == {name(1), name(2), name(3)}


@pytest.mark.parametrize("known", [True, False], ids=["first news", "given up before"])
def test_r12_workers_that_ended_because_the_driver_was_silent_count_as_no_failures(known: bool) -> None:
    sixteen = range(1, 17)
    bench = Bench.running(*sixteen, limits=Limits(16, 1, 16, failure_budget=1))
    if not known:
        for job in sixteen:
            bench.on(on.ConnectionLost(0, SlotId(f"{job}-0"), name(job)))
        bench.wait(bench.limits.reconnect_grace + 1.0, heartbeats_of=sixteen)
    for job in sixteen:
        bench.exit(name(job), DRIVER_SILENT_EXIT_CODE)
    assert not bench.state.workers
    assert not bench.find_commands(End)
    assert not bench.state.blacklist
    assert not bench.state.failures.records


def test_a_program_that_exits_with_the_code_of_a_silent_driver_ends_the_job() -> None:
    bench = Bench.running(1, failure_budget=0)
    for started in range(1, 25):
        if bench.find_commands(End):
            break
        bench.exit(name(1, started), DRIVER_SILENT_EXIT_CODE)
        bench.on(WorkerStarted(name(1, started + 1).slot, name(1, started + 1)))
    assert bench.end.outcome is JobOutcome.FAILURE_BUDGET


@pytest.mark.parametrize(
    "order", [on.HostsDiscovered(0, (("h1", 1), ("h2", 1))), on.DrainRequested(0, "it goes", host="h9")]
)
def test_r14_a_second_attempt_waits_until_the_first_must_have_ended(order: on.DriverEvent) -> None:
    """Spark retries a task whose process was killed, and reports nothing."""
    bench = Bench.running(1, 2, limits=Limits(2, 2, 2, driver_timeout=10.0))
    bench.exit(name(1), -9)
    bench.on(order)
    bench.copy(1)
    bench.wait(14.0, heartbeats_of=[2, "1-1"])
    assert not bench.released
    bench.wait(2.0, heartbeats_of=[2])
    assert bench.released == ["1-1"]
    bench.on(Heartbeat(SlotId("1-0")))
    assert bench.find_commands(ReleaseSlot)[-1].slot == "1-0"


def test_r18_a_worker_that_spoke_after_its_slot_is_waited_for_longer() -> None:
    bench = Bench.running(1, limits=Limits(1, 1, 2, driver_timeout=10.0))
    bench.start_warm(2)
    bench.wait(4.5, heartbeats_of=[2])
    bench.on(on.ConnectionBack(0, SlotId("1-0"), name(1)))
    bench.wait(11.0, heartbeats_of=[2])
    assert "1-0" not in bench.state.slots
    assert len(bench.find_commands(PublishWorld)) == 1, "it may train on until it misses the driver"
    bench.wait(5.0, heartbeats_of=[2])
    assert bench.members() == [name(2)]


def test_r18_an_evicted_worker_that_speaks_again_is_waited_for_anew() -> None:
    """Its host is cut off, for a moment is not, and is again before it learns that its worker was evicted."""
    bench = Bench.running(1, limits=Limits(1, 1, 2, driver_timeout=10.0))
    bench.start_warm(2)
    bench.wait(10.0, heartbeats_of=[2])
    assert not bench.state.workers.get(name(1))
    bench.on(Heartbeat(SlotId("1-0"), name(1), "S"))
    bench.wait(12.0, heartbeats_of=[2])
    assert len(bench.find_commands(PublishWorld)) == 1
    bench.on(Heartbeat(SlotId("1-0"), name(1), "T"))  # a stopped process trains nothing
    bench.wait(5.0, heartbeats_of=[2])
    assert bench.members() == [name(2)]


def test_a_slot_whose_connection_is_back_counts_as_seen() -> None:
    """Its connection is back before its next heartbeat."""
    bench = Bench.running(*ALL, driver_timeout=40.0)
    bench.on(on.ConnectionLost(0, SlotId("1-0")))
    bench.wait(4.5, heartbeats_of=(2, 3, 4))
    bench.on(on.ConnectionBack(0, SlotId("1-0")))
    bench.on(on.ConnectionBack(0, SlotId("1-0"), name(1)))
    bench.wait(1.5, heartbeats_of=(2, 3, 4))
    assert not bench.find_commands(AbortWorld)


@pytest.mark.parametrize(
    ("others", "bitwise", "late", "letter", "within"),
    [
        ("wait", False, 0.0, "", 1.1),
        ("wait", False, 0.0, "T", 0.35),  # stopped by a signal
        ("wait", False, 0.0, "Z", 1.1),
        ("work", False, 0.0, "T", 5.1),
        ("work", True, 0.0, "", 5.1),
        ("wait", False, 0.9, "", 2.9),  # as late as its heartbeats were at times, and twice as late again
        ("wait", False, 3.0, "", 5.1),
        ("wait", True, 0.0, "", 0.55),
        ("wait", True, 0.5, "", 1.6),
    ],
)
def test_r24_a_member_others_wait_for_is_lost(
    others: str, bitwise: bool, late: float, letter: str, within: float
) -> None:
    """letter: of its process, if its slot sends heartbeats."""
    bench = Bench.running(*ALL, driver_timeout=40.0)
    bench.wait(2.0, heartbeats_of=ALL)
    bench.wait(late, heartbeats_of=(1, 2, 3))
    began, waiting = bench.now, others == "wait"
    bench.on(Heartbeat(SlotId("4-0"), name(4), "S"))
    for _ in range(60):
        for job in (1, 2, 3):
            sign = waiting, bench.now - began, "", bitwise
            bench.on(Heartbeat(SlotId(f"{job}-0"), name(job), "S", *sign))
        if letter:
            bench.on(Heartbeat(SlotId("4-0"), name(4), letter))
        bench.wait(0.1)
        if bench.find_commands(AbortWorld):
            break
    assert within - 0.35 <= bench.now - began <= within + 0.3
    assert set(bench.state.workers) == {name(1), name(2), name(3)}


@pytest.mark.parametrize("seconds", [0.2, 0.3, 0.4, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("witness", [1, 2])
def test_r24_in_bitwise_mode_a_short_cut_of_the_drivers_network_makes_nobody_suspicious(
    witness: int, seconds: float
) -> None:
    """Those who wait send a heartbeat at each look, and one of them is heard first again."""
    bench = Bench.running(*ALL, driver_timeout=40.0)

    def wait(span: float) -> None:
        for turn in range(round(span / 0.1)):
            for job in ALL if turn % 3 == 2 else (1, 2, 3):
                bench.on(Heartbeat(SlotId(f"{job}-0"), name(job), "S", job < 4, 0.5, "", True))
            bench.wait(0.1)

    wait(3.0)
    bench.wait(seconds)
    bench.on(Heartbeat(SlotId(f"{witness}-0"), name(witness), "S", True, 1.5, "", True))
    bench.wait(0.1)
    wait(1.0)
    assert not bench.find_commands(AbortWorld)


@pytest.mark.parametrize("pause", ["of the driver", "of its network"])
def test_r24_while_the_driver_is_late_itself_nobody_is_suspicious(pause: str) -> None:
    bench = Bench.running(*ALL, driver_timeout=40.0)
    bench.wait(2.0, heartbeats_of=ALL)
    for job in (4, 3, 2, 1):
        bench.wait(0.1)
        bench.on(Heartbeat(SlotId(f"{job}-0"), name(job), "S", job < 4, 0.4))
    if pause == "of the driver":
        bench.now += 2.0
    else:
        bench.wait(2.0)
    bench.on(Heartbeat(SlotId("1-0"), name(1), "S", True, 2.4))
    bench.wait(0.5)
    bench.wait(1.0, heartbeats_of=ALL)
    assert not bench.find_commands(AbortWorld)
