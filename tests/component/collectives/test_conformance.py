"""One behaviour, two implementations: the engine and its fake, each with a thread per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from elastic_collectives.fakes import FakeFabric

SIZE = 3
Groups = list[Group]
Make = Callable[[float], Groups]


@pytest.fixture(params=["engine", "fake"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the groups of all ranks, given a timeout in seconds."""
    with ExitStack() as stack:

        def engine(timeout: float) -> Groups:
            ends = [stack.enter_context(Endpoint(b"a key")) for _ in range(SIZE)]
            blobs = [end.address.encode() for end in ends]
            groups = [connect(end, r, SIZE, (1, 1), lambda own: blobs, timeout) for r, end in enumerate(ends)]
            return [stack.enter_context(group) for group in groups]

        def fake(timeout: float) -> Groups:
            return list(FakeFabric(SIZE, timeout=timeout).groups)

        yield engine if request.param == "engine" else fake


def each(groups: Groups, call: Callable[[Group], Any]) -> list[Any]:
    """The results of all ranks; an error of a collective is a result."""

    def one(group: Group) -> Any:
        try:
            return call(group)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(one, groups))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize(("op", "expected"), [("sum", 9), ("min", 2), ("max", 4), ("product", 24)])
def test_allreduce(make: Make, op: str, expected: int, dtype: str) -> None:
    def call(group: Group) -> list[float]:
        array = np.full(5, group.rank + 2, dtype)
        group.allreduce(array, op)
        return [float(value) for value in array]

    assert each(make(10), call) == [[expected] * 5] * SIZE


def test_everything_else(make: Make) -> None:
    def call(group: Group) -> Any:
        array = np.full((2, 2), group.rank, np.int16)
        group.broadcast(array, 1)
        gathered = group.allgather(np.array([group.rank]))
        ragged = group.allgatherv(np.full((group.rank, 2), group.rank))
        group.barrier()
        return (
            array.tolist(),
            gathered.tolist(),
            [part.tolist() for part in ragged],
            group.allgather_bytes(b"x" * group.rank),
        )

    expected = ([[1, 1], [1, 1]], [[0], [1], [2]], [[], [[1, 1]], [[2, 2], [2, 2]]], [b"", b"x", b"xx"])
    assert each(make(10), call) == [expected] * SIZE


def test_what_makes_no_sense_is_refused_before_anything_is_sent(make: Make) -> None:
    group = make(10)[0]
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("float32", lambda: group.allreduce(np.zeros(3, np.float16))),
        ("op must be", lambda: group.allreduce(np.zeros(3), "mean")),
        ("algorithm", lambda: group.allreduce(np.zeros(3), algorithm="tree")),
        ("contiguous", lambda: group.allreduce(np.zeros((3, 3))[:, 1])),
        ("read-only", lambda: group.allreduce(read_only)),
        ("read-only", lambda: group.broadcast(read_only, 1)),
        ("root", lambda: group.broadcast(np.zeros(3), SIZE)),
    ]
    for words, call in wrong:
        with pytest.raises(ValueError, match=words):
            call()


def test_abort_frees_whoever_waits_and_the_first_reason_stays(make: Make) -> None:
    groups = make(10)
    each(
        groups, lambda group: group.barrier()
    )  # word of a failure goes along connections, so let all be open
    timer = threading.Timer(0.1, lambda: (groups[2].abort("first"), groups[2].abort("second")))
    timer.start()
    ends = each(groups[:2], lambda group: group.barrier())
    timer.join()
    assert [(type(end), end.ranks, end.reason) for end in ends] == [(GroupAborted, (), "first")] * 2
    assert all(
        isinstance(end, GroupAborted) for end in each(groups, lambda group: group.allreduce(np.zeros(0)))
    )


def test_ranks_that_do_not_come_are_named(make: Make) -> None:
    ends = each(make(1.2)[:2], lambda group: group.barrier())
    assert {type(end) for end in ends} == {CollectiveTimeout}
    assert {end.ranks for end in ends} == {(2,)}


def test_other_sizes_are_a_mismatch(make: Make) -> None:
    groups = make(10)
    each(groups, lambda group: group.barrier())
    ends = each(groups, lambda group: group.allreduce(np.zeros(3 + (group.rank == 1))))
    assert {type(end) for end in ends} == {MismatchError}
    assert all(1 in end.ranks for end in ends)


def test_other_collectives_are_a_mismatch(make: Make) -> None:
    groups = make(10)
    each(groups, lambda group: group.barrier())
    ends = each(groups, lambda group: group.barrier() if group.rank else group.allreduce(np.zeros(3)))
    assert {type(end) for end in ends} == {MismatchError}
    assert all(0 in end.ranks for end in ends)


def test_a_rank_that_has_closed_is_lost_to_the_others(make: Make) -> None:
    groups = make(10)
    each(groups, lambda group: group.barrier())
    groups[1].close()
    ends = each([groups[0], groups[2]], lambda group: group.barrier())
    assert [(type(end), end.ranks) for end in ends] == [(PeerLost, (1,))] * 2
    with pytest.raises(GroupAborted, match="closed"):
        groups[1].barrier()
