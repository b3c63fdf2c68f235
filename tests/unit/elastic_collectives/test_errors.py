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
def test_ranks_and_reason_or_one_message(error: CollectiveError, ranks: tuple[int, ...], reason: str) -> None:
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (type(one), one.ranks, one.reason, str(one)) == (type(error), ranks, reason, reason)


def test_what_a_subgroup_raises_in_the_whole_group_s_ranks() -> None:
    error = PeerLost([1], "rank 1 is gone")
    assert error.among(range(2)) is error
    told = error.among([2, 5])
    assert (type(told), told.ranks, told.reason) == (
        PeerLost,
        (5,),
        "rank 1 is gone (counted among ranks 2, 5)",
    )
