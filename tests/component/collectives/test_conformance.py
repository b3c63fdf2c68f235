"""One behaviour, two implementations: the engine and its fake, a thread per rank; also of groups beside a group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastic_collectives import (
    CollectiveError,
    CollectiveTimeout,
    Endpoint,
    Group,
    GroupAborted,
    MismatchError,
    PeerLost,
    connect,
)
from elastic_collectives.operands import narrow, widen
from tests.component.collectives import calls
from tests.component.collectives.ranks import local_ranks
from tests.fake_group import FakeFabric
from tests.reductions import reduce_parts
from tests.worlds import run_in_world

SIZE = 3
Groups = list[Group]
Make = Callable[[float], Groups]


HOSTS: dict[str, tuple[int, ...]] = {"sockets": (), "shared memory": (3,), "two hosts": (2, 1)}


@pytest.fixture(params=[*HOSTS, "fake"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the groups of all ranks, given a timeout in seconds."""
    with ExitStack() as stack:

        def engine(timeout: float) -> Groups:
            ends = [stack.enter_context(Endpoint(b"a key")) for _ in range(SIZE)]
            blobs = [end.address.encode() for end in ends]
            hosts = HOSTS[request.param]
            groups = [
                connect(end, r, SIZE, (1, 1), lambda own: blobs, timeout, local_ranks=local_ranks(r, hosts))
                for r, end in enumerate(ends)
            ]
            return [stack.enter_context(group) for group in groups]

        def make_fakes(timeout: float) -> Groups:
            return list(FakeFabric(SIZE, timeout=timeout).groups)

        yield make_fakes if request.param == "fake" else engine


def call_all(groups: Groups, call: Callable[[Group], Any]) -> list[Any]:
    """The results of all ranks; an error of a collective is a result."""

    def call_one(group: Group) -> Any:
        try:
            return call(group)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call_one, groups))


def test_the_fake_computes_what_the_engine_does_between_processes() -> None:
    """As `test_results.py` compares it with numpy."""
    members: Any = [SimpleNamespace(live=group) for group in FakeFabric(SIZE, timeout=60.0).groups]
    with ThreadPoolExecutor(SIZE) as pool:
        assert [wrong for wrong, _ in pool.map(calls.reduce_everything, members)] == [[]] * SIZE
        for check in (calls.reduce_in_chunks, calls.exchange_everything, calls.check_other_collectives):
            assert list(pool.map(check, members)) == [[]] * SIZE


def test_averages_by_weight_and_factors(make: Make) -> None:
    def call(group: Group) -> Any:
        share = np.array([group.rank + 1.0, np.nan if group.rank == 1 else 5.0])
        weighed, nothing, factors = share.copy(), share.copy(), np.array([1, 3])
        group.allreduce(weighed, "average", weight=(3, 0, 1)[group.rank])
        group.allreduce(nothing, "average", weight=0)
        group.allreduce(factors, "average", scale=(2, 1.5))
        part = group.reducescatter(np.ones((4, 2)), "average", weight=group.rank + 1.0)
        return weighed.tolist(), nothing.tolist(), factors.tolist(), part.tolist()

    parts = [[[1.0, 1.0]] * rows for rows in (2, 1, 1)]
    expected = [([1.5, 5.0], [0.0, 0.0], [3, 9], part) for part in parts]
    assert call_all(make(10), call) == expected


@pytest.mark.parametrize(("compression", "wire"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_compression(request: pytest.FixtureRequest, make: Make, compression: str, wire: str) -> None:
    hosts = HOSTS.get(request.node.callspec.params["make"], ())
    shares = [np.random.default_rng(rank).normal(size=1001).astype(np.float32) for rank in range(SIZE)]

    def call(group: Group) -> Any:
        array = shares[group.rank].copy()
        group.allreduce(array, "average", scale=(2.0, 0.5), compression=compression)
        part = group.reducescatter(shares[group.rank], "sum", compression=compression)
        return array, part

    packed = [narrow(share, wire) for share in shares]
    if len(hosts) > 1:
        averaged = calls.compute_packed_sum([2 * share for share in shares], wire, hosts, 0.5 / SIZE)
    else:
        halved = reduce_parts([narrow(2 * share, wire) for share in shares], wire, "average", 0.5)
        averaged = widen(halved, wire)
    summed = widen(reduce_parts(packed, wire, "sum", 1.0), wire)
    found = call_all(make(10), call)
    assert all(np.array_equal(array, averaged.astype(np.float32)) for array, _ in found)
    assert np.array_equal(np.concatenate([part for _, part in found]), summed)


def test_a_group_of_arrays(make: Make) -> None:
    def call(group: Group) -> Any:
        own = group.rank + 1
        arrays = [np.full((2, 2), own, np.float32), np.full(3, own), np.full(1, own, np.float32), np.zeros(0)]
        group.grouped_allreduce(arrays)
        group.grouped_allreduce([])
        return [array.tolist() for array in arrays]

    assert call_all(make(10), call) == [[[[6, 6], [6, 6]], [6, 6, 6], [6], []]] * SIZE


@pytest.mark.parametrize("rows", [1, 1 << 17])
def test_alltoall_of_separate_arrays(make: Make, rows: int) -> None:
    def call(group: Group) -> Any:
        sent = [np.full((rows * group.rank, 2), 10 * group.rank + to, np.int16) for to in range(SIZE)]
        out = [np.zeros((rows * source, 2), np.int16) for source in range(SIZE)]
        group.alltoall_arrays(sent, out)
        return [np.unique(array).tolist() for array in out]

    expected = [[[], *([10 * source + rank] for source in range(1, SIZE))] for rank in range(SIZE)]
    assert call_all(make(10), call) == expected


def test_alltoall_of_separate_arrays_fails_if_one_has_another_size_than_expected(make: Make) -> None:
    def call(group: Group) -> None:
        sent = [np.ones(3 if group.rank == 1 and to == 2 else 2) for to in range(SIZE)]
        group.alltoall_arrays(sent, [np.zeros(2) for _ in range(SIZE)])
        group.barrier()

    ends = call_all(make(10), call)
    assert {type(end) for end in ends} == {MismatchError}, ends
    assert all(set(end.ranks) == {1, 2} for end in ends)


def test_results_go_where_the_caller_wants_them(make: Make) -> None:
    def call(group: Group) -> Any:
        own, rows = np.full(2, group.rank), np.full((SIZE, 2), group.rank)
        gathered, part, swapped = np.zeros((SIZE, 2), int), np.zeros((1, 2), int), np.zeros((SIZE, 2), int)
        assert group.allgather(own, out=gathered) is gathered
        assert group.reducescatter(rows, out=part) is part
        assert group.alltoall(rows, out=swapped)[0] is swapped
        with pytest.raises(ValueError, match=r"out must be a writable C-contiguous array of shape \(3, 2\)"):
            group.allgather(own, out=part)
        return gathered.tolist(), part.tolist(), swapped.tolist()

    every = [[rank, rank] for rank in range(SIZE)]
    assert call_all(make(10), call) == [(every, [[3, 3]], every)] * SIZE


def test_invalid_arguments_are_refused_before_anything_is_sent(make: Make) -> None:
    group, read_only = make(10)[0], np.zeros(3)
    read_only.flags.writeable = False
    wrong: dict[str, Callable[[], Any]] = {
        "op must be": lambda: group.allreduce(np.zeros(3), "mean"),
        "contiguous": lambda: group.allreduce(np.zeros((3, 3))[:, 1]),
        "read-only": lambda: group.allreduce(read_only),
        "read-only.*": lambda: group.broadcast(read_only, 1),
        "root": lambda: group.broadcast(np.zeros(3), SIZE),
        "adasum": lambda: group.reducescatter(np.zeros(3), "adasum"),
        "scalar": lambda: group.reducescatter(np.array(3.0)),
        "splits": lambda: group.alltoall(np.zeros(3), [1, 1, 2]),
        "weight": lambda: group.grouped_allreduce([np.zeros(3)], weight=1),
    }
    for words, call in wrong.items():
        with pytest.raises(ValueError, match=words):
            call()


def test_abort_ends_waiting_collectives_with_the_first_reason(make: Make) -> None:
    groups = make(10)
    # Word of a failure goes along connections, so let all be open.
    call_all(groups, lambda group: group.barrier())
    timer = threading.Timer(0.1, lambda: (groups[2].abort("first"), groups[2].abort("second")))
    timer.start()
    ends = call_all(groups[:2], lambda group: group.barrier())
    timer.join()
    assert [(type(end), end.ranks, end.reason) for end in ends] == [(GroupAborted, (), "first")] * 2
    later = call_all(groups, lambda group: group.allreduce(np.zeros(0)))
    assert all(isinstance(end, GroupAborted) for end in later)


def test_a_timeout_names_the_missing_ranks(make: Make) -> None:
    ends = call_all(make(1.2)[:2], lambda group: group.barrier())
    assert {type(end) for end in ends} == {CollectiveTimeout}
    assert {end.ranks for end in ends} == {(2,)}


FLAT = np.zeros(3, np.float32)
MISMATCHES: dict[str, tuple[Callable[[Group], Any], Callable[[Group], Any]]] = {
    "sizes": (lambda g: g.allreduce(np.zeros(3)), lambda g: g.allreduce(np.zeros(4))),
    "nothing": (lambda g: g.allreduce(np.zeros(3)), lambda g: g.allreduce(np.zeros(0))),
    "shapes": (lambda g: g.allreduce(np.zeros((2, 3))), lambda g: g.allreduce(np.zeros((3, 2)))),
    "dtypes": (lambda g: g.allreduce(np.zeros(3)), lambda g: g.allreduce(np.zeros(3, int))),
    "operations": (lambda g: g.allreduce(np.zeros(3)), lambda g: g.allreduce(np.zeros(3), "max")),
    "wires": (lambda g: g.allreduce(FLAT), lambda g: g.allreduce(FLAT, compression="bf16")),
    "weights": (lambda g: g.allreduce(FLAT, "average"), lambda g: g.allreduce(FLAT, "average", weight=2)),
    "collectives": (lambda g: g.barrier(), lambda g: g.allreduce(np.zeros(3))),
    "parts": (lambda g: g.reducescatter(np.zeros((3, 1))), lambda g: g.reducescatter(np.zeros((4, 1)))),
    "broadcasts": (lambda g: g.broadcast(np.zeros(3), 0), lambda g: g.broadcast(np.zeros(3, int), 0)),
    "nothing from a root": (lambda g: g.broadcast(np.zeros(3), 0), lambda g: g.broadcast(np.zeros(0), 0)),
    "gathered": (lambda g: g.allgather(np.zeros(3)), lambda g: g.allgather(np.zeros(0))),
    "ragged": (lambda g: g.allgatherv(np.zeros((1, 3))), lambda g: g.allgatherv(np.zeros((1, 2)))),
    "splits": (lambda g: g.alltoall(np.zeros((3, 1))), lambda g: g.alltoall(np.zeros((3, 2)))),
}


@pytest.mark.parametrize("what", MISMATCHES)
@pytest.mark.parametrize("odd_one", [0, 2])
def test_every_rank_fails_at_once_on_a_mismatch(make: Make, what: str, odd_one: int) -> None:
    groups = make(30)
    call_all(groups, lambda group: group.barrier())
    usual, other = MISMATCHES[what]

    def call(group: Group) -> None:
        (other if group.rank == odd_one else usual)(group)
        group.barrier()  # a broadcast's root does not wait for anybody

    ends = call_all(groups, call)
    assert {type(end) for end in ends} == {MismatchError}
    assert all(odd_one in end.ranks and "called" in end.reason for end in ends)


@pytest.mark.parametrize("rows", [1, 1 << 17])
def test_alltoall_fails_on_all_ranks_if_one_sends_more_rows_than_expected(make: Make, rows: int) -> None:
    def call(group: Group) -> Any:
        array, usual = np.full((SIZE * rows, 2), group.rank), [rows] * SIZE
        received, counts = group.alltoall(array, incoming=usual)
        assert received[:, 0].tolist() == np.repeat(range(SIZE), rows).tolist()
        assert counts == usual
        group.alltoall(array, incoming=usual if group.rank != 1 else [rows, rows, rows + 1])
        group.barrier()

    ends = call_all(make(30), call)
    assert {type(end) for end in ends} == {MismatchError}, ends
    assert all(set(end.ranks) == {1, 2} and "which expects" in end.reason for end in ends)


def test_a_rank_that_has_closed_is_lost_to_the_others(make: Make) -> None:
    groups = make(10)
    call_all(groups, lambda group: group.barrier())
    groups[1].close()
    ends = call_all([groups[0], groups[2]], lambda group: group.barrier())
    assert [(type(end), end.ranks) for end in ends] == [(PeerLost, (1,))] * 2
    with pytest.raises(GroupAborted, match="closed"):
        groups[1].barrier()


Worlds = Callable[[int, Callable[[Group], Any]], list[Any]]
ROUNDS = 30


def of_fakes(size: int, work: Callable[[Group], Any]) -> list[Any]:
    fabric = FakeFabric(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, fabric.groups))


@pytest.fixture(
    params=[pytest.param(run_in_world, marks=pytest.mark.native), of_fakes], ids=["engine", "fake"]
)
def worlds(request: pytest.FixtureRequest) -> Worlds:
    return request.param  # type: ignore[no-any-return]


def sums(group: Group, rounds: int = ROUNDS) -> list[float]:
    totals = []
    for turn in range(rounds):
        array = np.full(100, float(group.rank + turn))
        group.allreduce(array)
        totals.append(float(array[7]))
    return totals


def expect(size: int) -> list[float]:
    return [float(sum(rank + turn for rank in range(size))) for turn in range(ROUNDS)]


def test_groups_of_one_world_work_side_by_side_in_threads_of_their_own(worlds: Worlds) -> None:
    def work(group: Group) -> tuple[list[float], list[float], list[float] | None]:
        everybody = group.subgroup(1)
        some = group.subgroup(2, [0, 2]) if group.rank != 1 else None
        assert (everybody.rank, everybody.size, everybody.fence) == (group.rank, 3, group.fence)
        with ThreadPoolExecutor(3) as pool:
            mine = [pool.submit(sums, one) for one in (group, everybody, some) if one is not None]
            totals = [one.result() for one in mine]
        return totals[0], totals[1], totals[2] if some else None

    results = worlds(3, work)
    assert [(first, second) for first, second, _ in results] == [(expect(3), expect(3))] * 3
    assert [third for _, _, third in results] == [expect(2), None, expect(2)]


def test_members_are_named_as_the_whole_group_names_them(worlds: Worlds) -> None:
    def work(group: Group) -> Any:
        assert list(group.members) == [0, 1, 2, 3]
        if group.rank == 0:
            return None
        some = group.subgroup(1, [1, 2, 3])
        last = some.subgroup(2, [1, 2]) if some.rank else None
        return list(some.members), last and list(last.members)

    assert worlds(4, work) == [None, ([1, 2, 3], None), *[([1, 2, 3], [2, 3])] * 2]


def test_a_subgroup_uses_a_connection_that_another_group_began_to_accept(worlds: Worlds) -> None:
    """Rank 0 dials the one while rank 1 may still be turning the other's event loop, for the last time."""

    def work(group: Group) -> bool:
        group.subgroup(1).barrier()
        group.barrier()
        return True

    assert all(worlds(2, work) == [True, True] for _ in range(ROUNDS))


@pytest.mark.parametrize("end", ["abort", "close"])
def test_closing_or_aborting_a_group_ends_its_subgroups(worlds: Worlds, end: str) -> None:
    def work(group: Group) -> str:
        beside = group.subgroup(7)
        beside.barrier()
        with ThreadPoolExecutor(1) as pool:
            # Rank 1 does not come.
            waiting = pool.submit(beside.barrier) if group.rank == 0 else None
            group.barrier()
            if waiting is None:
                beside.close()
                return "left"
            group.abort("the test has had enough") if end == "abort" else group.close()
            with pytest.raises(CollectiveError):
                waiting.result(5)
        with pytest.raises(CollectiveError):
            group.subgroup(8).barrier()
        return "freed"

    assert worlds(2, work)[0] == "freed"


@pytest.mark.parametrize(
    ("channel", "ranks", "says"),
    [(0, None, "above 0"), (1, [1], "not among"), (1, [1, 0], "ascending"), (1, [0, 9], "in \\[0, 2")],
)
def test_invalid_ranks_of_a_subgroup_are_refused(channel: int, ranks: list[int] | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FakeFabric(2).group(0).subgroup(channel, ranks)
