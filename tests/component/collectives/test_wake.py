"""How soon everybody knows of an end: over several worlds, with a bound that a loaded machine keeps."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable

import pytest

from tests.component.collectives import calls
from tests.component.collectives import shared_calls as shared
from tests.component.collectives.ranks import Pool, answers, call_all

LAYOUTS = [(), (3,), (2, 1)]
BOUND = 0.05  # seconds: about 1 ms after an abort and 10 ms after a death where processors are free


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_an_abort_wakes_every_waiter(
    pool: Pool, hosts: tuple[int, ...], record_property: Callable[[str, object], None]
) -> None:
    ranks = pool.take(3)
    waits = []
    for _ in range(15):
        pool.world(ranks, hosts=hosts)
        call_all(ranks, calls.barrier)
        for number, rank in enumerate(ranks):
            rank.call(shared.time_end_of_barrier, number == 1)
        first, aborted, last = answers(ranks)
        waits.append(max(first, last) - aborted)
    record_property("milliseconds from abort to the last waiter", 1000 * statistics.median(waits))
    assert statistics.median(waits) < BOUND


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_a_death_wakes_every_waiter(
    pool: Pool, hosts: tuple[int, ...], record_property: Callable[[str, object], None]
) -> None:
    waits = []
    for _ in range(5):
        ranks = pool.take(3)
        pool.world(ranks, hosts=hosts)
        call_all(ranks, calls.barrier)
        for rank in ranks[:2]:
            rank.call(shared.time_end_of_barrier, False)
        time.sleep(0.02)  # for both to be blocked; sooner is just as right
        killed = time.perf_counter()
        ranks[2].close()
        waits.append(max(answers(ranks[:2])) - killed)
    record_property("milliseconds from death to the last waiter", 1000 * statistics.median(waits))
    assert sorted(waits)[1] < BOUND  # few worlds, and a machine that pauses would pass for a slow median


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_shared_memory_is_handed_out_is_reported_and_leaks_nothing(
    pool: Pool, victim: int
) -> None:
    """The host's first rank has made the memory, and waits for one that has not come: one of both dies."""
    ranks = pool.take(3)
    pool.world(ranks, timeout=3, hosts=(3,))
    ranks[0].call(calls.barrier)
    until = time.monotonic() + 20
    while "memfd:elastic-segment" not in _mappings(ranks[0].process.pid):
        assert time.monotonic() < until
        time.sleep(0.005)
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
    assert call_all(survivors, shared.segments) == [1, 1]  # the new world's alone


def _mappings(pid: int) -> str:
    with open(f"/proc/{pid}/maps") as maps:
        return maps.read()
