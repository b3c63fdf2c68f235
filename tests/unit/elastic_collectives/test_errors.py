from __future__ import annotations

import pickle

import pytest

from elastic_collectives import CollectiveError, PeerLost


@pytest.mark.parametrize(
    ("error", "ranks", "reason"),
    [
        (PeerLost([1, 2], "they are gone"), (1, 2), "they are gone"),
        (CollectiveError("injected"), (), "injected"),
        (CollectiveError(OSError("a broken pipe")), (), "a broken pipe"),
        (CollectiveError(), (), ""),
    ],
)
def test_a_collective_error_has_ranks_and_a_reason_or_one_message(
    error: CollectiveError, ranks: tuple[int, ...], reason: str
) -> None:
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (type(one), one.ranks, one.reason, str(one)) == (type(error), ranks, reason, reason)


def test_errors_of_a_subgroup_name_ranks_of_the_whole_group() -> None:
    error = PeerLost([1], "rank 1 is gone")
    same = error.to_world_ranks(range(2))
    assert (same is error, type(same), same.ranks, same.reason) == (False, PeerLost, (1,), error.reason)
    told = error.to_world_ranks([2, 5])
    assert (type(told), told.ranks, told.reason) == (
        PeerLost,
        (5,),
        "rank 1 is gone (counted among ranks 2, 5)",
    )
