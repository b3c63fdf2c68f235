"""Groups beside a group: collectives of their own, at the same time, and one end for all. Engine and fake alike."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from elastic_collectives import CollectiveError, Group
from tests.fake_group import FakeFabric
from tests.unit.torch.worlds import run_in_world

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
