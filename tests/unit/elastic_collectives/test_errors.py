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
