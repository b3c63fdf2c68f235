"""What the fake offers beyond a group: ends at a chosen collective. The rest is in component/collectives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elastic_collectives import CollectiveError, CollectiveTimeout, Group, GroupAborted, PeerLost
from tests.fake_group import FakeFabric


def _sum_until_error(group: Group) -> tuple[int, CollectiveError | None]:
    """Of at most ten allreduces, how many succeeded and what ended them."""
    for done in range(10):
        array = np.full(4, float(group.rank))
        try:
            group.allreduce(array)
        except CollectiveError as error:
            return done, error
        assert array[0] == sum(range(group.size))
    return 10, None


def _call_all(fabric: FakeFabric) -> list[tuple[int, CollectiveError | None]]:
    with ThreadPoolExecutor(fabric.size) as pool:
        return list(pool.map(_sum_until_error, fabric.groups))


def test_a_rank_is_killed_at_its_nth_collective() -> None:
    fabric = FakeFabric(3)
    fabric.kill_at(1, 4)
    ends = _call_all(fabric)
    assert [done for done, _ in ends] == [3, 3, 3]
    assert [type(error) for _, error in ends] == [PeerLost, GroupAborted, PeerLost]
    assert all(error is not None and error.ranks == (1,) for _, error in ends)


def test_a_collective_fails_on_all_ranks_with_the_chosen_error() -> None:
    fabric = FakeFabric(3)
    fabric.fail_at(2, 1, CollectiveTimeout([0], "too late"))
    for done, error in _call_all(fabric):
        assert (done, type(error), str(error)) == (0, CollectiveTimeout, "too late")


def test_a_killed_rank_is_lost_even_while_no_other_rank_waits() -> None:
    fabric = FakeFabric(2)
    fabric.kill(0)
    with pytest.raises(PeerLost, match="rank 0"):
        fabric.group(1).barrier()


@pytest.mark.parametrize("made_before", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_a_subgroup_names_a_lost_rank_by_its_own_numbers(killed: bool, made_before: bool) -> None:
    fabric = FakeFabric(4)
    if made_before:
        fabric.group(1).subgroup(1, [1, 3])
    if killed:
        fabric.kill(3)
    else:
        fabric.fail(CollectiveTimeout([0, 3], "too late"))
    group = fabric.group(3).subgroup(1, [1, 3])
    with pytest.raises(CollectiveError) as broke:
        group.barrier()
    assert broke.value.ranks == (1,)
    assert broke.value.to_world_ranks(group.members).ranks == (3,)
