"""What is taken for a loss, and what is not: one truth table a rule."""

from __future__ import annotations

import pytest

from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages as said
from spark_elastic.protocol.commands import AbortWorld, NotifyUser, StopWorker
from spark_elastic.protocol.types import SlotId
from tests.unit.protocol.driver_bench import Bench, at, name

W2 = name(2)


@pytest.mark.parametrize(
    "event",
    [
        said.WorkerExited(W2.slot, W2, -9),
        said.WorkerRaised(W2, None, None, "f", "ValueError: x"),
        on.LaunchEnded(0, 2, "task failed"),
        on.HostLost(0, "h2", "executor lost"),
        said.WorkerStarted(SlotId("2-0"), name(2, 2)),
    ],
)
def test_some_events_evict_a_worker_at_once(event: on.DriverEvent) -> None:
    bench = Bench.running(1, 2, 3, 4)
    bench.on(event)
    assert [abort.fence for abort in bench.find_commands(AbortWorld)] == [bench.fence]
    assert W2 in bench.find_commands(AbortWorld)[0].reason
    assert W2 not in bench.state.workers


@pytest.mark.parametrize(
    ("worker_cut", "slot_cut", "suspected", "after", "lost"),
    [
        (False, False, True, 3.0, False),  # suspicion alone never evicts
        (False, True, False, 3.0, False),  # nor a slot's connection
        (True, False, True, 0.0, True),
        (True, False, False, 0.9, False),
        (True, False, False, 1.1, True),
        (True, True, False, 0.0, False),  # it may be everybody's
        (True, True, False, 0.1, True),
    ],
)
def test_a_broken_connection_evicts_after_its_grace_period(
    worker_cut: bool, slot_cut: bool, suspected: bool, after: float, lost: bool
) -> None:
    bench = Bench.running(1, 2, 3, 4)
    if worker_cut:
        bench.on(on.ConnectionLost(0, SlotId("2-0"), W2))
    if slot_cut:
        bench.on(on.ConnectionLost(0, SlotId("2-0")))
    if suspected:
        bench.join(name(1), bench.fence, suspects=(W2,))
    bench.wait(after, heartbeats_of=[1, 2, 3, 4])
    assert (W2 not in bench.state.workers) is lost


def test_r15_a_worker_whose_slot_starts_a_new_process_for_it_may_take_long_to_connect() -> None:
    bench = Bench.running(1, 2, 3, 4)
    bench.on(on.ConnectionLost(0, SlotId("2-0"), W2))
    bench.on(said.WorkerStarted(SlotId("2-0"), W2))
    bench.wait(8.0, heartbeats_of=[1, 2, 3, 4])
    assert W2 in bench.state.workers


def test_r12_a_worker_that_does_not_reconnect_after_a_mass_disconnect_is_evicted() -> None:
    bench = Bench.running(1, 2, 3, 4)
    for job in (1, 2, 3, 4):
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0"), name(job)))
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0")))
    bench.wait(2.0)
    for job in (1, 3, 4):
        bench.on(on.ConnectionBack(0, SlotId(f"{job}-0"), name(job)))
    bench.wait(0.9, heartbeats_of=(1, 3, 4))
    assert not bench.find_commands(AbortWorld)
    bench.wait(0.2, heartbeats_of=(1, 3, 4))
    assert W2 in bench.find_commands(AbortWorld)[0].reason


def test_r12_a_newcomer_whose_connection_does_not_break_makes_a_cut_of_the_driver_no_loss() -> None:
    """It was between two requests, so that there was nothing to break: the others' breaks looked like their losses."""
    jobs = range(1, 101)
    bench = Bench.running(*jobs, num_workers=100, max_workers=101)
    bench.slot(101)
    bench.join(name(101))
    for job in jobs:
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0"), name(job), reset=True))
        bench.on(on.ConnectionLost(0, SlotId(f"{job}-0"), reset=True))
    bench.wait(3.0)
    back = [job for job in jobs if job != 2]
    for job in back:
        bench.on(on.ConnectionBack(0, SlotId(f"{job}-0")))
        bench.on(on.ConnectionBack(0, SlotId(f"{job}-0"), name(job)))
    bench.wait(0.9, heartbeats_of=back)
    assert not bench.find_commands(AbortWorld)
    bench.wait(0.2, heartbeats_of=back)
    assert [stop.worker for stop in bench.find_commands(StopWorker)] == [W2]


def test_a_loss_in_a_large_job_is_seen_at_once_while_others_are_heard() -> None:
    bench = Bench.running(*range(1, 101), num_workers=100, max_workers=100)
    bench.on(on.ConnectionLost(0, SlotId("2-0"), W2))
    bench.on(on.ConnectionLost(0, SlotId("2-0")))
    bench.wait(0.04)
    bench.on(said.Heartbeat(SlotId("1-0"), name(1), "S"))
    bench.wait(0.06)
    assert W2 in bench.find_commands(AbortWorld)[0].reason


def test_r24_survivors_of_a_large_job_keep_the_pace_that_they_were_told() -> None:
    """With 500 slots each beats every 2 s; ten that are left would beat four times a second, once they know."""
    jobs = range(1, 501)
    bench = Bench.running(*jobs, num_workers=500, max_workers=500)
    for job in jobs:
        bench.on(said.Heartbeat(SlotId(f"{job}-0"), name(job), "S"))
    for job in jobs[10:]:
        bench.on(on.LaunchEnded(0, job, "its executor is lost", executor_lost=True))
    for now, lost in ((1.9, False), (3.0, True)):
        while bench.now < now:
            bench.on(said.Heartbeat(SlotId("1-0"), name(1), "S", waits=True, seconds=1.0))
            bench.wait(0.1)
        assert (W2 not in bench.state.workers) is lost


def test_r12_a_large_job_of_which_nobody_is_heard_has_a_driver_that_is_cut_off() -> None:
    """With 200 slots each beats every 0.8 s: one that beat just before would be suspicious before all seem silent."""
    jobs = range(1, 201)
    bench = Bench.running(*jobs, num_workers=200, max_workers=200)
    for job in jobs:
        bench.wait(0.004)
        waits = {"waits": True, "seconds": 1.0} if job > 1 else {}
        bench.on(said.Heartbeat(SlotId(f"{job}-0"), name(job), "S", **waits))
    bench.wait(2.0)
    assert not bench.find_commands(AbortWorld)


@pytest.mark.parametrize(
    ("letter", "lost"), [("S", False), ("R", False), ("", False), ("T", True), ("Z", True)]
)
def test_a_stopped_process_does_not_renew_its_lease(letter: str, lost: bool) -> None:
    bench = Bench.running(1, 2, 3, 4)
    for _ in range(12):
        bench.wait(0.5, heartbeats_of=[1, 3, 4])
        bench.on(said.Heartbeat(SlotId("2-0"), W2, letter))
    assert (W2 not in bench.state.workers) is lost
    assert bool(bench.find_commands(StopWorker)) is lost
    if lost:
        assert bench.find_commands(StopWorker)[0].kill


def test_imports_that_keep_a_host_busy_cost_no_worker() -> None:
    """A worker that is evicted while it starts is started again: on a busy machine that would never end."""
    bench = Bench.running(1, 2, 3, 4, max_workers=5)
    bench.slot(5)
    bench.wait(29.0, heartbeats_of=[1, 2, 3, 4])
    assert name(5) in bench.state.workers
    bench.wait(2.0, heartbeats_of=[1, 2, 3, 4])
    assert name(5) not in bench.state.workers


def test_a_late_message_about_an_older_worker_is_ignored() -> None:
    """Held up on the way, while its host was cut off: the newer one stays what it is."""
    bench = Bench.running(1, 2, 3, 4)
    bench.exit(W2, -9)
    bench.on(said.WorkerStarted(name(2, 3).slot, name(2, 3)))
    bench.on(said.WorkerStarted(name(2, 2).slot, name(2, 2)))
    assert name(2, 3) in bench.state.workers
    assert name(2, 2) in bench.state.workers.departed


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            said.WorkerExited(W2.slot, W2, -9, "killed by signal 9"),
            f"the process of worker {W2} ended: killed by signal 9",
        ),
        (
            on.HostLost(0, "h2", "Spark lost executor 2"),
            f"worker {W2} was lost with its slot: host h2 is lost: Spark lost executor 2",
        ),
    ],
)
def test_a_cause_reported_after_the_next_world_reaches_the_user(event: on.DriverEvent, said: str) -> None:
    bench = Bench.running(1, 2, num_workers=2)
    bench.on(on.ConnectionLost(0, W2.slot, W2))
    bench.join(name(1), bench.fence, at(5), suspects=(W2,), reason="it hung up")
    assert bench.members() == [name(1)]
    bench.on(event)
    assert [told.reason for told in bench.find_commands(NotifyUser)][-1:] == [said]


def test_the_reason_of_the_next_world_names_the_lost_worker_and_its_exit() -> None:
    bench = Bench.running(1, 2, num_workers=2)
    bench.on(said.RequestNextWorld(name(1), bench.fence, at(5), suspects=(W2,), reason="it hung up"))
    assert "could not continue" in bench.find_commands(AbortWorld)[0].reason
    bench.exit(W2, -9, "killed by signal 9")
    assert bench.members() == [name(1)]
    assert f"worker {W2}" in bench.world.reason
    assert "is lost: its process ended" in bench.world.reason
    assert "could not continue" not in bench.world.reason
