"""What the fake offers beyond a group: its end at a test's word. The rest is in component/collectives."""

from __future__ import annotations

import pytest

from elastic_collectives import CollectiveError, CollectiveTimeout, PeerLost
from tests.fake_group import FakeFabric


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
