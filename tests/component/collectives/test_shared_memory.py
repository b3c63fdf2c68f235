"""Ranks of one host over shared memory, and of two hosts in two levels: results, ends of every kind, and what stays."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

from tests.component.collectives import calls
from tests.component.collectives import shared_calls as shared
from tests.component.collectives.ranks import Failed, Pool, answers, call_all

LAYOUTS = [(2,), (4,), (2, 2), (3, 1), (1, 2)]
ENDS = [((3,), 1), ((2, 2), 0), ((2, 2), 3), ((3, 1), 2)]  # hosts and the rank that comes to an end


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_r07_sums_are_right_and_equal_bit_by_bit(pool: Pool, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(sum(hosts))
    pool.world(ranks, hosts=hosts)
    found = call_all(ranks, calls.reduce_everything)
    assert [wrong for wrong, _ in found] == [[]] * len(ranks)
    assert len({digest for _, digest in found}) == 1
    assert call_all(ranks, calls.check_other_collectives) == [[]] * len(ranks)


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_operands_in_shared_memory_and_parts_for_each_rank(pool: Pool, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(sum(hosts))
    pool.world(ranks, hosts=hosts)
    assert call_all(ranks, shared.reduce_in_buffers) == [[]] * len(ranks)
    assert call_all(ranks, shared.scatter_and_exchange) == [[]] * len(ranks)
    in_memory = [count for count in hosts for _ in range(count)]
    assert call_all(ranks, shared.segments) == [min(count - 1, 1) for count in in_memory]


@pytest.mark.parametrize(
    ("hosts", "victim", "action"),
    [(*end, action) for end, action in zip(itertools.cycle(ENDS), shared.ACTIONS, strict=False)]
    + [((2, 2), 3, "plain"), ((2, 2), 0, "buffer")],
)
def test_every_survivor_names_the_killed_rank(
    pool: Pool, hosts: tuple[int, ...], victim: int, action: str
) -> None:
    ranks = pool.take(sum(hosts))
    pool.world(ranks, hosts=hosts)
    for rank in ranks:
        rank.call(shared.repeat_until_signal, action, victim, signal.SIGKILL)
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    ends = answers(survivors)
    assert [(end.kind, end.ranks) for end in ends] == [("PeerLost", (victim,))] * len(survivors)


@pytest.mark.parametrize(("hosts", "victim"), ENDS)
def test_every_rank_names_the_stopped_rank(pool: Pool, hosts: tuple[int, ...], victim: int) -> None:
    ranks = pool.take(sum(hosts))
    pool.world(ranks, timeout=1.5, hosts=hosts)
    for rank in ranks:
        rank.call(shared.repeat_until_signal, "buffer", victim, signal.SIGSTOP)
    others = [rank for number, rank in enumerate(ranks) if number != victim]
    ranks[victim].await_stopped()
    ends = answers(others)
    ranks[victim].send_signal(signal.SIGCONT)
    assert [(end.kind, end.ranks) for end in ends] == [("CollectiveTimeout", (victim,))] * len(others)
    assert ranks[victim].answer().kind in {"CollectiveTimeout", "PeerLost"}


@pytest.mark.parametrize(("hosts", "victim"), ENDS)
def test_abort_frees_every_rank_although_a_peer_is_stopped(
    pool: Pool, hosts: tuple[int, ...], victim: int
) -> None:
    ranks = pool.take(sum(hosts))
    pool.world(ranks, timeout=60, hosts=hosts)
    for rank in ranks:
        rank.call(shared.repeat_until_signal, "plain", victim, signal.SIGSTOP)
    ranks[victim].await_stopped()
    others = [rank for number, rank in enumerate(ranks) if number != victim]
    others[-1].abort("the victim lost its heartbeat")
    ends = answers(others)
    ranks[victim].send_signal(signal.SIGCONT)
    told = Failed("GroupAborted", (), "the victim lost its heartbeat")
    # Another host may have seen no more of it than the end of its connection.
    assert [end for end in ends if end != told and (len(hosts) == 1 or end.kind != "PeerLost")] == []
    assert ends[-1] == told
    assert ranks[victim].answer().kind in {"GroupAborted", "PeerLost"}
    assert call_all(others, calls.try_everything) == [{end.kind} for end in ends]


@pytest.mark.parametrize("hosts", [(3,), (2, 2)])
def test_other_sizes_and_collectives_are_a_mismatch_on_every_rank(pool: Pool, hosts: tuple[int, ...]) -> None:
    ranks = pool.take(sum(hosts))
    pool.world(ranks, hosts=hosts)
    counts = [3, 4, *[3] * (len(ranks) - 2)]
    ends = call_all(ranks, calls.reduce_own_size, counts, "auto")
    assert {end.kind for end in ends} == {"MismatchError"}
    assert all(1 in end.ranks and "24 bytes" in end.reason and "32 bytes" in end.reason for end in ends)


def test_ctrl_c_ends_a_blocked_collective_and_the_peers_wait(pool: Pool) -> None:
    ranks = pool.take(3)
    pool.world(ranks, timeout=60, hosts=(3,))
    for rank in ranks[:2]:
        rank.call(calls.barrier)
    time.sleep(0.5)  # for both to be blocked; sooner is just as right
    ranks[0].send_signal(signal.SIGINT)
    assert ranks[0].answer().kind == "KeyboardInterrupt"
    end = ranks[1].answer()
    assert end.kind == "GroupAborted"


@pytest.mark.parametrize(("refused", "limit"), [(0, "files"), (2, "mappings")])
def test_all_ranks_of_a_host_use_sockets_if_one_gets_no_shared_memory(
    pool: Pool, refused: int, limit: str
) -> None:
    ranks = pool.take(3)
    pool.world(ranks)
    call_all(ranks, shared.record_warnings)
    assert call_all(ranks[refused : refused + 1], shared.refuse_memory, limit) == [None]
    for _ in range(2):  # and it is said once
        pool.world(ranks, hosts=(3,))
        assert call_all(ranks, calls.reduce_once, 1000) == [6.0] * 3
    assert call_all(ranks, shared.segments) == [0] * 3
    assert call_all(ranks[refused : refused + 1], shared.allow_memory, limit) == [None]
    assert call_all(ranks, shared.reduce_in_buffers) == [[]] * 3  # what they are given then is their own
    pool.world(ranks, hosts=(3,))
    assert call_all(ranks, calls.reduce_once, 1000) == [6.0] * 3
    assert call_all(ranks, shared.segments) == [1] * 3
    heard = call_all(ranks, shared.read_warnings)
    assert [len(said) for said in heard] == [int(rank == refused) for rank in range(3)]
    assert heard[refused][0].startswith(
        f"ranks 0, 1, 2 of one host exchange through sockets, since rank {refused} has no shared memory: "
    )


def test_r11_shared_memory_outlives_its_group_and_is_used_by_no_other(pool: Pool) -> None:
    ranks = pool.take(2)
    pool.world(ranks, hosts=(2,))
    call_all(ranks, shared.keep_buffer)
    pool.world(ranks, hosts=(2,))
    assert call_all(ranks, calls.reduce_once, 100_000) == [3.0, 3.0]
    assert call_all(ranks, shared.segments) == [
        2,
        2,
    ]  # this generation's, and the kept memory of the one before
    assert call_all(ranks, shared.is_kept_buffer_unchanged) == [True, True]
    assert call_all(ranks, shared.segments) == [1, 1]


@pytest.mark.timeout(300)
def test_shared_memory_has_no_name_and_a_thousand_rebuilds_leak_nothing(pool: Pool) -> None:
    ranks = pool.take(2)
    first = max(next(pool.generations) for _ in range(1000)) - 999
    everybody = [rank.address for rank in ranks]
    for number, rank in enumerate(ranks):
        rank.call(shared.rebuild, everybody, number, first, 1000)
    for early, late in answers(ranks):
        assert late["descriptors"] <= early["descriptors"] + 2  # a neighbour's hello may just be coming in
        assert late["threads"] == early["threads"]
        assert late["mappings"] <= early["mappings"] + 4
        assert late["bytes"] < early["bytes"] + (4 << 20)
    assert [name for name in os.listdir("/dev/shm") if "elastic" in name] == []
