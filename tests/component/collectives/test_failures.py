"""How a group ends: killed and stopped peers, abort, mismatch, Ctrl-C; and what comes after it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.component.collectives import calls
from tests.component.collectives.ranks import Failed, Pool, Rank, answers, call_all


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (5, 3)])
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


BOTH_WAYS = pytest.mark.parametrize("hosts", [(), (2,)], ids=["sockets", "shared memory"])


@BOTH_WAYS
def test_a_rank_that_died_before_it_connected_is_named_as_missing(pool: Pool, hosts: tuple[int, ...]) -> None:
    """The lower rank of two opens their connection; where memory is shared, while they settle who shares it."""
    ranks = pool.take(2)
    pool.world(ranks, timeout=60, hosts=hosts)
    ranks[0].send_signal(signal.SIGKILL)
    ranks[0].process.wait()
    (end,) = call_all(ranks[1:], calls.barrier)
    assert (end.kind, end.ranks) == ("PeerLost", (0,))
    assert "died before it connected" in end.reason


@BOTH_WAYS
def test_a_kill_is_noticed_although_a_child_of_the_rank_lives(pool: Pool, hosts: tuple[int, ...]) -> None:
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


LAYOUTS: list[tuple[int, ...]] = [(), (3,), (2, 1)]
# Hosts, and the rank that comes to an end.
ENDS = [((3,), 1), ((2, 2), 0), ((2, 2), 3), ((3, 1), 2)]
IN_MEMORY = ("ring", "buffer", "reducescatter", "alltoall", "barrier", "broadcast", "allgather", "buffer")
# Where the machine itself pauses for a second, others are named.
IN_CI = ("ring", "broadcast", "alltoall", "barrier")


def cross(*, slow: bool = False) -> list[Any]:
    """Every collective in each layout, rank 2 coming to an end; then other ends on hosts of several ranks. Each build
    plays each collective in one layout, or, where that is slow, few by sockets; the long runs play all."""
    cases: list[Any] = []
    for (place, hosts), (number, work) in itertools.product(enumerate(LAYOUTS), enumerate(calls.WORK)):
        is_long = hosts or work not in IN_CI if slow else number % len(LAYOUTS) != place
        cases.append(pytest.param(hosts, 2, work, marks=[pytest.mark.faults] * bool(is_long)))
    others = IN_MEMORY[1:2] * 4 if slow else IN_MEMORY
    return cases + [(*end, work) for end, work in zip(itertools.cycle(ENDS), others, strict=False)]


def begin_work(
    pool: Pool, hosts: tuple[int, ...], victim: int, work: str, number: int, timeout: float
) -> tuple[Rank, list[Rank]]:
    """The victim, which sends itself a signal, and the others."""
    ranks = pool.take(sum(hosts) or 3)
    pool.world(ranks, timeout=timeout, hosts=hosts)
    call_all(ranks, calls.barrier)
    for rank in ranks:
        rank.call(calls.work_until_it_fails, work, victim, number)
    return ranks[victim], [rank for place, rank in enumerate(ranks) if place != victim]


@pytest.mark.parametrize(("hosts", "victim", "work"), cross())
def test_a_kill_ends_every_collective(pool: Pool, hosts: tuple[int, ...], victim: int, work: str) -> None:
    _, others = begin_work(pool, hosts, victim, work, signal.SIGKILL, 30.0)
    assert [(end.kind, end.ranks) for end in answers(others)] == [("PeerLost", (victim,))] * len(others)


@pytest.mark.parametrize(("hosts", "victim", "work"), cross(slow=True))
def test_a_stop_is_named_by_collectives(pool: Pool, hosts: tuple[int, ...], victim: int, work: str) -> None:
    stopped, others = begin_work(pool, hosts, victim, work, signal.SIGSTOP, 1.2 if not hosts else 1.5)
    ends = answers(others)
    stopped.send_signal(signal.SIGCONT)
    assert [(end.kind, end.ranks) for end in ends] == [("CollectiveTimeout", (victim,))] * len(others)
    assert work != "ring" or "waiting for rank(s) 2" in ends[0].reason
    assert isinstance(stopped.answer(), Failed)


@pytest.mark.parametrize(("hosts", "victim", "work"), cross())
def test_an_abort_ends_every_collective(pool: Pool, hosts: tuple[int, ...], victim: int, work: str) -> None:
    """Although a peer is stopped."""
    stopped, others = begin_work(pool, hosts, victim, work, signal.SIGSTOP, 60.0)
    stopped.await_stopped()
    others[-1].abort("enough")
    ends = answers(others)
    stopped.send_signal(signal.SIGCONT)
    told = Failed("GroupAborted", (), "enough")
    assert ends[-1] == told
    # Another host may have seen no more of it than the end of its connection.
    may_differ = "PeerLost" if len(hosts) > 1 and hosts != (2, 1) else None
    assert [end for end in ends if end != told and end.kind != may_differ] == []
    assert isinstance(stopped.answer(), Failed)
    assert call_all(others, calls.try_everything) == [{end.kind} for end in ends]


@BOTH_WAYS
@pytest.mark.parametrize(
    ("reason", "heard"),
    [("x" + "é" * 2100, "x" + "é" * 2047), ("no file \udcff", "no file \\udcff")],
    ids=["longer than a close frame holds", "with a lone surrogate"],
)
def test_any_text_can_end_a_group(pool: Pool, reason: str, heard: str, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(2)
    pool.world(ranks, timeout=60, hosts=hosts)
    call_all(ranks, calls.barrier)
    ranks[0].call(calls.barrier)
    ranks[1].abort(reason)
    assert ranks[0].answer() == Failed("GroupAborted", (), heard)


@pytest.mark.parametrize("algorithm", ["ring", "bcube"])
def test_other_sizes_are_a_mismatch_on_every_rank_and_end_the_group(pool: Pool, algorithm: str) -> None:
    ranks = pool.take(4)
    pool.world(ranks)
    call_all(ranks, calls.barrier)  # word of a failure goes along connections, so let all be open
    ends = call_all(ranks, calls.reduce_own_size, [3, 3, 4, 3], algorithm)
    assert {end.kind for end in ends} == {"MismatchError"}
    assert all(2 in end.ranks and "24 bytes" in end.reason and "32 bytes" in end.reason for end in ends)
    assert call_all(ranks, calls.try_everything) == [{"MismatchError"}] * 4
    pool.world(ranks)
    assert call_all(ranks, calls.reduce_once, 10) == [10.0] * 4


@pytest.mark.parametrize("hosts", [(), (3,)], ids=["sockets", "shared memory"])
def test_ctrl_c_ends_a_blocked_collective_and_the_peers_wait(pool: Pool, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(3)
    pool.world(ranks, timeout=60, hosts=hosts)
    for rank in ranks[:2]:
        rank.call(calls.barrier)
    time.sleep(0.3)  # for both to be blocked; sooner is just as right
    ranks[0].send_signal(signal.SIGINT)
    assert ranks[0].answer().kind == "KeyboardInterrupt"
    end = ranks[1].answer()
    assert end.kind == "GroupAborted"
    assert hosts or end.ranks == (0,)
    assert call_all(ranks[:1], calls.try_everything) == [{"GroupAborted"}]
