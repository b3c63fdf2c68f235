"""How long a wait may last, who is told of it meanwhile, and how soon everybody knows of an end; by all ways."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.component.collectives import calls
from tests.component.collectives.ranks import Pool, answers, call_all
from tests.patience import until

LAYOUTS = pytest.mark.parametrize(
    "hosts",
    [
        pytest.param((), id="sockets", marks=pytest.mark.faults),
        pytest.param((3,), id="one host", marks=pytest.mark.faults),
        pytest.param((2, 1), id="two hosts"),
    ],
)


@LAYOUTS
def test_a_wait_without_limit_outlasts_its_timeout(pool: Pool, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(3)
    pool.world(ranks, timeout=1.0, hosts=hosts)
    for number, rank in enumerate(ranks):
        rank.call(calls.reduce_late, 3.0 if number == 1 else 0.0, None)
    first, late, last = answers(ranks)
    assert not late  # it waited for nobody
    told = first + last
    assert {missing for _, ranks in told for missing in ranks} == {1}
    assert min(seconds for seconds, _ in told) >= 2.0
    assert hosts != (3,) or not last  # of those on a host who see the same, the first is told


@LAYOUTS
def test_a_limit_that_is_set_during_a_wait_counts_from_then(pool: Pool, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(3)
    pool.world(ranks, timeout=60, hosts=hosts)
    for number, rank in enumerate(ranks):
        rank.call(*((calls.reduce_once_limited, 0.6) if number != 1 else (calls.reduce_late, 2.0, 60.0)))
    first, late, last = answers(ranks)
    assert {(end.kind, end.ranks) for end in (first, last)} == {("CollectiveTimeout", (1,))}
    assert "timed out after 600 ms" in first.reason
    assert late.kind == "CollectiveTimeout"


@pytest.mark.faults
def test_a_timeout_does_not_blame_ranks_that_wait_themselves(pool: Pool) -> None:
    ranks = pool.take(13)
    pool.world(ranks, timeout=60)
    for number, rank in enumerate(ranks):
        rank.call(calls.reduce_late, 4.6 if number == 12 else 0.0, 60.0, True)
    told = [line for lines in answers(ranks) for line in lines]
    assert {missing for _, ranks in told for missing in ranks} == {12}


@pytest.mark.parametrize("hosts", [pytest.param((), id="sockets"), pytest.param((2,), id="one host")])
def test_a_rank_that_was_stopped_does_not_time_out_its_peers(pool: Pool, hosts: tuple[int, ...]) -> None:
    first, second = ranks = pool.take(2)
    pool.world(ranks, timeout=1.5, hosts=hosts)
    assert call_all(ranks, calls.reduce_once, 10) == [3.0, 3.0]
    first.call(calls.reduce_once, 10)
    time.sleep(0.3)
    first.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    first.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    second.call(calls.reduce_once, 10)
    assert answers(ranks) == [3.0, 3.0]


WAYS = [(), (3,), (2, 1)]
BOUND = 0.05  # seconds: about 1 ms after an abort and 10 ms after a death where processors are free


@pytest.mark.parametrize("hosts", WAYS)
@pytest.mark.parametrize(("end", "worlds"), [("abort", 15), ("death", 5)])
def test_an_abort_or_a_death_wakes_every_waiter(
    pool: Pool, hosts: tuple[int, ...], end: str, worlds: int, record_property: Callable[[str, object], None]
) -> None:
    waits = []
    for _ in range(worlds):
        ranks = pool.take(3)
        pool.world(ranks, hosts=hosts)
        call_all(ranks, calls.barrier)
        for rank in ranks[:2]:
            rank.call(calls.time_end_of_barrier, False)
        if end == "abort":
            ranks[2].call(calls.time_end_of_barrier, True)
            ended = ranks[2].answer()
        else:
            time.sleep(0.02)  # for both to be blocked; sooner is just as right
            ended = time.perf_counter()
            ranks[2].close()
        waits.append(max(answers(ranks[:2])) - ended)
    record_property(f"milliseconds from {end} to the last waiter", 1000 * statistics.median(waits))
    # Of few worlds, a machine that pauses would pass for a slow median.
    assert (sorted(waits)[1] if end == "death" else statistics.median(waits)) < BOUND


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_memory_is_handed_out_is_reported_and_leaks_nothing(pool: Pool, victim: int) -> None:
    """The host's first rank has made the memory, and waits for one that has not come: one of both dies."""
    ranks = pool.take(3)
    pool.world(ranks, timeout=3, hosts=(3,))
    ranks[0].call(calls.barrier)
    mappings = Path(f"/proc/{ranks[0].process.pid}/maps")
    until(lambda: "memfd:elastic-segment" in mappings.read_text())
    if victim == 1:
        ranks[2].call(calls.barrier)
    ranks[victim].send_signal(signal.SIGKILL)
    if victim == 0:
        for rank in ranks[1:]:
            rank.call(calls.barrier)
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    ends = answers(survivors)
    # Word goes along connections: who has none yet waits for its deadline, and then names whom it lacked.
    assert [end.kind for end in ends if victim not in end.ranks] == []
    assert {end.kind for end in ends} <= {"PeerLost", "CollectiveTimeout"}
    pool.world(survivors, hosts=(2,))
    assert call_all(survivors, calls.reduce_once, 1000) == [3.0, 3.0]
    assert call_all(survivors, calls.segments) == [1, 1]  # the new world's alone
