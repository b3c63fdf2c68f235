"""How a group ends: killed and stopped peers, abort, mismatch, Ctrl-C; and what comes after it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from elastic_collectives import Endpoint, GroupAborted, connect
from tests.component.collectives import calls
from tests.component.collectives.ranks import Failed, Pool, answers, call_all


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 1), (4, 0), (5, 3)])
def test_every_survivor_names_the_killed_rank(
    pool: Pool, size: int, victim: int, record_property: Callable[[str, object], None]
) -> None:
    ranks = pool.take(size)
    pool.world(ranks)
    for rank in ranks:
        rank.call(calls.work_until_it_fails, "ring", victim, signal.SIGKILL)
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    ends = answers(survivors)
    assert [(end.kind, end.ranks) for end in ends] == [("PeerLost", (victim,))] * (size - 1)
    assert len({end.reason for end in ends}) <= 2  # the cause of whoever noticed first, on both of its sides
    begin = time.perf_counter()
    pool.world(survivors)
    assert call_all(survivors, calls.reduce_once, 500_000) == [size * (size - 1) / 2] * (size - 1)
    record_property("milliseconds to a new world's sum", 1000 * (time.perf_counter() - begin))


@pytest.mark.parametrize("hosts", [(), (2,)], ids=["sockets", "shared memory"])
def test_a_rank_that_died_before_it_connected_is_named_as_missing(pool: Pool, hosts: tuple[int, ...]) -> None:
    """The lower rank of two opens their connection; where memory is shared, while they settle who shares it."""
    ranks = pool.take(2)
    pool.world(ranks, timeout=60, hosts=hosts)
    ranks[0].send_signal(signal.SIGKILL)
    ranks[0].process.wait()
    (end,) = call_all(ranks[1:], calls.barrier)
    assert (end.kind, end.ranks) == ("PeerLost", (0,))
    assert "died before it connected" in end.reason


@pytest.mark.parametrize("hosts", [(), (2,)], ids=["sockets", "shared memory"])
def test_a_kill_is_noticed_although_a_forked_child_of_the_rank_survives(
    pool: Pool, hosts: tuple[int, ...]
) -> None:
    """As a DataLoader's workers do for some seconds."""
    ranks = pool.take(2)
    pool.world(ranks, timeout=60, hosts=hosts)
    call_all(ranks, calls.barrier)
    (child,) = call_all(ranks[1:], calls.fork)
    try:
        assert call_all(ranks, calls.barrier) == [None, None]  # the parent loses nothing by it
        ranks[0].call(calls.barrier)
        begin = time.monotonic()
        ranks[1].send_signal(signal.SIGKILL)
        end = ranks[0].answer()
        assert (end.kind, end.ranks) == ("PeerLost", (1,))
        assert time.monotonic() - begin < 5.0  # a few milliseconds, where the machine is free
    finally:
        os.kill(child, signal.SIGKILL)


ALL_LAYOUTS = pytest.mark.parametrize("hosts", [(), (3,), (2, 1)], ids=["sockets", "one host", "two hosts"])
SLOW_BUT_SOCKETS = pytest.mark.parametrize(
    "hosts",
    [
        pytest.param((), id="sockets"),
        pytest.param((3,), id="one host", marks=pytest.mark.faults),
        pytest.param((2, 1), id="two hosts", marks=pytest.mark.faults),
    ],
)

IN_CI = (
    "ring",
    "broadcast",
    "alltoall",
    "barrier",
)  # where the machine itself pauses for a second, others are named
STOPPED = [pytest.param(work, marks=() if work in IN_CI else pytest.mark.faults) for work in calls.WORK]


@ALL_LAYOUTS
@pytest.mark.parametrize("work", calls.WORK)
def test_a_kill_ends_every_collective(pool: Pool, work: str, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(3)
    pool.world(ranks, hosts=hosts)
    for rank in ranks:
        rank.call(calls.work_until_it_fails, work, 2, signal.SIGKILL)
    assert [(end.kind, end.ranks) for end in answers(ranks[:2])] == [("PeerLost", (2,))] * 2


@SLOW_BUT_SOCKETS
@pytest.mark.parametrize("work", STOPPED)
def test_a_stopped_rank_is_named_by_every_collective(pool: Pool, work: str, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(3)
    pool.world(ranks, timeout=1.2, hosts=hosts)
    for rank in ranks:
        rank.call(calls.work_until_it_fails, work, 2, signal.SIGSTOP)
    ends = answers(ranks[:2])
    ranks[2].send_signal(signal.SIGCONT)
    assert [(end.kind, end.ranks) for end in ends] == [("CollectiveTimeout", (2,))] * 2
    assert work != "ring" or "waiting for rank(s) 2" in ends[0].reason
    assert isinstance(ranks[2].answer(), Failed)


@ALL_LAYOUTS
@pytest.mark.parametrize("work", calls.WORK)
def test_an_abort_ends_every_collective(pool: Pool, work: str, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(3)
    pool.world(ranks, timeout=60, hosts=hosts)
    call_all(ranks, calls.barrier)
    for rank in ranks:
        rank.call(calls.work_until_it_fails, work, 2, signal.SIGSTOP)
    ranks[2].await_stopped()
    ranks[1].abort("enough")
    ends = answers(ranks[:2])
    ranks[2].send_signal(signal.SIGCONT)
    assert ends == [Failed("GroupAborted", (), "enough")] * 2
    assert isinstance(ranks[2].answer(), Failed)


@pytest.mark.parametrize("hosts", [(), (2,)], ids=["sockets", "shared memory"])
@pytest.mark.parametrize(
    ("reason", "heard"),
    [
        pytest.param("x" + "é" * 2100, "x" + "é" * 2047, id="longer than a close frame holds"),
        pytest.param("no file \udcff", "no file \\udcff", id="with a lone surrogate"),
    ],
)
def test_any_text_can_be_the_reason_of_an_abort(
    pool: Pool, reason: str, heard: str, hosts: tuple[int, ...]
) -> None:
    ranks = pool.take(2)
    pool.world(ranks, timeout=60, hosts=hosts)
    call_all(ranks, calls.barrier)
    ranks[0].call(calls.barrier)
    ranks[1].abort(reason)
    assert ranks[0].answer() == Failed("GroupAborted", (), heard)


def test_a_reason_that_is_no_text_is_an_error_of_its_kind_nevertheless() -> None:
    with Endpoint(b"key") as endpoint:
        with connect(endpoint, 0, 1, (1, 1), lambda own: [own]) as group:
            group._native.abort(b"no \xff text")  # type: ignore[attr-defined]
            with pytest.raises(GroupAborted, match="no \ufffd text"):
                group.barrier()


@pytest.mark.parametrize("algorithm", ["ring", "bcube"])
def test_other_sizes_are_a_mismatch_on_every_rank(pool: Pool, algorithm: str) -> None:
    ranks = pool.take(4)
    pool.world(ranks)
    call_all(ranks, calls.barrier)  # word of a failure goes along connections, so let all be open
    ends = call_all(ranks, calls.reduce_own_size, [3, 3, 4, 3], algorithm)
    assert {end.kind for end in ends} == {"MismatchError"}
    assert all(2 in end.ranks and "24 bytes" in end.reason and "32 bytes" in end.reason for end in ends)


def test_other_collectives_are_a_mismatch_on_every_rank(pool: Pool) -> None:
    ranks = pool.take(3)
    pool.world(ranks)
    call_all(ranks, calls.barrier)
    for rank, function in zip(ranks, (calls.barrier, calls.gather, calls.barrier), strict=True):
        rank.call(function)
    ends = answers(ranks)
    assert {end.kind for end in ends} == {"MismatchError"}
    assert all("barrier" in end.reason and "allgather" in end.reason for end in ends)


def test_a_failed_group_never_works_again(pool: Pool) -> None:
    ranks = pool.take(2)
    pool.world(ranks)
    call_all(ranks, calls.reduce_own_size, [3, 4], "ring")
    assert call_all(ranks, calls.try_everything) == [{"MismatchError"}] * 2
    pool.world(ranks)
    assert call_all(ranks, calls.reduce_once, 10) == [3.0, 3.0]


def test_ctrl_c_ends_a_blocked_collective_and_the_peers_wait(pool: Pool) -> None:
    ranks = pool.take(3)
    pool.world(ranks, timeout=60)
    for rank in ranks[:2]:
        rank.call(calls.barrier)
    time.sleep(0.3)  # for both to be blocked; sooner is just as right
    ranks[0].send_signal(signal.SIGINT)
    assert ranks[0].answer().kind == "KeyboardInterrupt"
    end = ranks[1].answer()
    assert (end.kind, end.ranks) == ("GroupAborted", (0,))
    assert call_all(ranks[:1], calls.try_everything) == [{"GroupAborted"}]
