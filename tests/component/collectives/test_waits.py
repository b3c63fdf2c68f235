"""How long a wait may last, and who is told of it meanwhile: over sockets, one host and two."""

from __future__ import annotations

import signal
import time

import pytest

from tests.component.collectives import calls
from tests.component.collectives.ranks import Pool, answers, call_all

LAYOUTS = pytest.mark.parametrize(
    "hosts",
    [
        pytest.param((), id="sockets", marks=pytest.mark.faults),
        pytest.param((3,), id="one host", marks=pytest.mark.faults),
        pytest.param((2, 1), id="two hosts"),
    ],
)


@LAYOUTS
def test_a_wait_without_limit_outlasts_the_timeout_and_reports_the_missing_ranks(
    pool: Pool, hosts: tuple[int, ...]
) -> None:
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
def test_a_limit_that_is_set_during_a_wait_counts_from_that_moment(
    pool: Pool, hosts: tuple[int, ...]
) -> None:
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
        rank.call(calls.gather_late, 4.6 if number == 12 else 0.0)
    told = [line for lines in answers(ranks) for line in lines]
    assert {missing for _, ranks in told for missing in ranks} == {12}


@pytest.mark.parametrize("hosts", [pytest.param((), id="sockets"), pytest.param((2,), id="one host")])
def test_a_rank_that_was_stopped_does_not_time_out_its_peers_when_it_continues(
    pool: Pool, hosts: tuple[int, ...]
) -> None:
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
