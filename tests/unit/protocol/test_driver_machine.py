"""The driver's machine from start to end, and the types of the protocol: tables, the pace of heartbeats, slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.config import ElasticConfig
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages as said
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    Fence,
    HostUpdateResult,
    Phase,
    Position,
    SlotId,
    SlotSpec,
    Table,
    heartbeat_interval,
)
from tests.unit.protocol.driver_bench import Bench, at, name

CLOSE = Position(0, Phase.CLOSE, 0)
ONE_JOINS = INITIAL_VERSION.next(update=HostUpdateResult.added)


def _finish(bench: Bench, *jobs: int) -> None:
    for job in jobs:
        bench.on(said.WorkerDone(name(job), bench.fence, CLOSE, f"result {job}"))


# ---- slots and jobs


def test_a_cancelled_slot_job_ends_the_job_and_is_not_launched_again() -> None:
    bench = Bench.running(1, 2, 3, 4)
    bench.on(on.LaunchEnded(0, 2, "sc.cancelJobGroup", cancelled=True))
    assert bench.end.outcome is do.JobOutcome.CANCELLED
    assert len(bench.find_commands(do.LaunchSlot)) == 4


def test_r14_a_second_attempt_parks_while_the_world_is_full() -> None:
    bench = Bench.running(1, 2, max_workers=2, num_workers=2)
    bench.copy(1)
    bench.wait(1.0, heartbeats_of=[1, 2])
    assert not bench.find_commands(do.AnnounceChange)
    assert not bench.released
    bench.exit(name(2), -9)
    bench.regroup(3, name(1))
    assert bench.members() == [name(1), "1-1.1"]  # capacity allows
    assert len(bench.find_commands(do.LaunchSlot)) == 2


def test_r14_slots_of_second_attempts_join_after_others() -> None:
    bench = Bench(max_workers=3, num_workers=3, min_workers=3)
    bench.start_warm(1)
    bench.copy(1)
    bench.start_warm(2)
    assert bench.members() == [name(1), name(2), "1-1.1"]


# ---- worlds


@pytest.mark.scenario("U1")
def test_r16_a_first_world_begins_with_min_workers_after_gather_timeout() -> None:
    bench = Bench(min_workers=2)
    bench.start_warm(1)
    bench.wait(11.0, heartbeats_of=[1])
    assert not bench.find_commands(do.PublishWorld)
    bench.start_warm(2)
    assert bench.world.size == 2


@pytest.mark.scenario("U1")
def test_too_few_workers_after_start_timeout_end_the_job_with_the_names_of_those_awaited() -> None:
    bench = Bench(min_workers=3, start_timeout=20.0)
    bench.start_warm(1)
    bench.slot(2)
    bench.wait(21.0, heartbeats_of=[1, 2])
    assert bench.end.outcome is do.JobOutcome.NOT_ENOUGH_WORKERS
    for part in (
        "1 workers came within 20 s and 3 are needed",
        "lower num_workers or min_workers, give the application more cores, or raise start_timeout",
        "hosts: h1, h2",
        "did not start: 3, 4",
        name(2),
    ):
        assert part in bench.end.reason


def test_r04_a_worker_from_an_older_world_is_stopped() -> None:
    bench = Bench.running(1, 2, 3, 4, regroup_timeout=30.0)
    bench.exit(name(1), -9)
    bench.regroup(3, name(3), name(2))
    bench.wait(31.0, heartbeats_of=[2, 3, 4])
    assert bench.members() == [name(2), name(3)]
    assert name(4) in [stop.worker for stop in bench.find_commands(do.StopWorker) if stop.kill]
    bench.join(name(4), Fence(1, 1), at(3))
    assert [type(command) for command in bench.commands] == [do.StopWorker]


def test_r10_a_join_that_the_current_world_answers_changes_nothing() -> None:
    bench = Bench.running(1, 2, 3, 4)
    before = replace(bench.state.workers[name(2)], last_seen=0.0)
    bench.join(name(2))
    assert bench.commands == ()
    assert replace(bench.state.workers[name(2)], last_seen=0.0) == before


@pytest.mark.parametrize("order", [None, on.DrainRequested(0, "it goes", host="h1")])
def test_once_the_reset_limit_is_used_up_no_planned_change_ends_the_job(order: on.DriverEvent | None) -> None:
    bench = Bench.running(1, 2, reset_limit=1)
    bench.start_warm(3)
    bench.stop_planned(1, name(1), name(2))
    bench.form()
    bench.start_warm(4)
    if order is not None:
        bench.on(order)
    bench.wait(1.0, heartbeats_of=(1, 2, 3, 4))
    assert len(bench.find_commands(do.AnnounceChange)) == 1
    bench.exit(name(3), -9)
    bench.regroup(3, name(1), name(2))
    assert bench.end.outcome is do.JobOutcome.RESET_LIMIT


# ---- planned changes


@pytest.mark.scenario("U1")
def test_newcomers_are_announced_once_after_the_debounce_and_let_in() -> None:
    bench = Bench.running(1, 2)
    bench.slot(3)
    bench.slot(4)
    bench.join(name(3))
    bench.on(on.Tick(0))
    assert not bench.find_commands(do.AnnounceChange)
    bench.wait(0.5, heartbeats_of=[1, 2, 3, 4])
    bench.join(name(4))
    bench.wait(0.5, heartbeats_of=[1, 2, 3, 4])
    assert [announce.version for announce in bench.find_commands(do.AnnounceChange)] == [ONE_JOINS]
    bench.stop_planned(6, name(2), name(1))
    assert bench.members() == [name(job) for job in (1, 2, 3, 4)]
    assert (bench.world.version, bench.world.position) == (ONE_JOINS, at(6))
    assert not bench.find_commands(do.AbortWorld)


@pytest.mark.scenario("U1")
def test_w14_all_workers_hear_of_a_change_once_also_when_another_comes_while_it_is_under_way() -> None:
    bench = Bench.running(1, 2)
    bench.start_warm(3)
    bench.wait(0.5, heartbeats_of=[1, 2, 3])
    bench.join(name(1), bench.fence, at(5), planned=True)
    bench.start_warm(4)
    bench.join(name(2), bench.fence, at(5), planned=True)
    assert bench.members() == [name(job) for job in (1, 2, 3, 4)]
    assert [announce.version for announce in bench.find_commands(do.AnnounceChange)] == [ONE_JOINS]


def test_a_member_that_misses_the_planned_stop_is_left_out() -> None:
    bench = Bench.running(1, 2, regroup_timeout=30.0)
    bench.start_warm(3)
    bench.wait(0.5, heartbeats_of=[1, 2, 3])
    bench.stop_planned(6, name(1))
    bench.wait(61.0, heartbeats_of=[1, 2, 3])
    assert bench.members() == [name(1), name(3)]
    assert "did not come to the planned stop" in bench.find_commands(do.AbortWorld)[0].reason


# ---- the end


@pytest.mark.scenario("U1")
def test_r15_results_in_rank_order_once_all_are_done() -> None:
    bench = Bench.running(1, 2, 3, 4)
    _finish(bench, 3, 1, 4)
    assert not bench.find_commands(do.End)
    _finish(bench, 2)
    assert bench.end.outcome is do.JobOutcome.SUCCESS
    assert bench.end.results == ("result 1", "result 2", "result 3", "result 4")
    assert {stop.worker for stop in bench.find_commands(do.StopWorker)} == {name(job) for job in (1, 2, 3, 4)}
    assert set(bench.released) == {"1-0", "2-0", "3-0", "4-0"}


def test_r15_after_rank_0s_result_no_world_is_formed_and_what_fails_does_not_cost_it() -> None:
    """An exception beyond the failure budget, processes killed for memory, and a slot job that somebody cancels."""
    bench = Bench.running(1, 2, 3, failure_budget=0)
    _finish(bench, 1)
    bench.start_warm(4)
    bench.wait(1.0, heartbeats_of=[1, 2, 3, 4])
    bench.on(
        said.WorkerRaised(name(2), bench.fence, CLOSE, "f", "ValueError: in a callback of the last rank")
    )
    bench.exit(name(2), -9, out_of_memory=True)
    assert not bench.find_commands(do.AnnounceChange)
    assert not bench.find_commands(do.AbortWorld)
    bench.on(on.LaunchEnded(0, 3, "by hand", cancelled=True))
    assert bench.end.outcome is do.JobOutcome.SUCCESS
    assert bench.end.results == ("result 1", "null", "null")


def test_r15_the_loss_of_rank_0_before_its_result_regroups_finished_members() -> None:
    bench = Bench.running(1, 2, 3, 4)
    _finish(bench, 2, 3)
    bench.exit(name(1), -9)
    bench.join(name(4), bench.fence, CLOSE, reason="rank 0 closed its connection")
    assert bench.members() == [name(2), name(3), name(4)]
    assert bench.world.position == CLOSE
    _finish(bench, 2, 3, 4)
    assert bench.end.results == ("result 2", "result 3", "result 4")


def test_r15_the_wait_for_a_member_that_never_reports_is_limited() -> None:
    bench = Bench.running(1, 2)
    _finish(bench, 1)
    bench.wait(31.0, heartbeats_of=[1, 2])
    bench.check_end(do.JobOutcome.SUCCESS, name(2))


def test_after_the_end_of_the_job_all_workers_and_slots_are_stopped() -> None:
    bench = Bench.running(1, 2, 3, 4)
    bench.on(on.CancelRequested(0, "Ctrl-C"))
    assert bench.end.outcome is do.JobOutcome.CANCELLED
    bench.on(said.RegisterSlot(SlotId("9-0"), "h9", 9))
    assert [type(command) for command in bench.commands] == [do.ReleaseSlot]
    bench.join(name(1), bench.fence, at(3))
    assert [type(command) for command in bench.commands] == [do.StopWorker]
    bench.wait(100.0)
    assert bench.commands == ()


def test_step_leaves_the_state_that_it_was_given_alone() -> None:
    bench = Bench.running(1, 2, 3)
    before, frozen = bench.state, bench.state.copy()
    bench.exit(name(2), -9)
    assert before == frozen


# ---- tables, the pace of heartbeats, and what a slot's process learns of the job's settings


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
