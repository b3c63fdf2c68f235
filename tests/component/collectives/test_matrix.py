"""Every operation, dtype and size in worlds of one to eight, over sockets, one host and two. Not in every build."""

from __future__ import annotations

import pytest

from elastic_collectives.operands import DTYPES
from tests.component.collectives import calls
from tests.component.collectives.ranks import Pool, call_all

HOSTS = {
    "sockets": lambda size: (),
    "one host": lambda size: (size,),
    "two hosts": lambda size: (size - size // 2, size // 2),
}


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", HOSTS)
@pytest.mark.parametrize("size", range(1, 9))
def test_every_operation_agrees_with_numpy(pool: Pool, size: int, layout: str) -> None:
    ranks = pool.take(size)
    hosts = [count for count in HOSTS[layout](size) if count]
    pool.world(ranks, timeout=120, hosts=hosts)
    for dtype in DTYPES:  # one by one, since an answer has a deadline
        found = call_all(ranks, calls.reduce_everything, (dtype,))
        assert [wrong for wrong, _ in found] == [[]] * size
        assert len({digest for _, digest in found}) == 1
    assert call_all(ranks, calls.reduce_in_chunks, hosts) == [[]] * size
    for check in (calls.exchange_everything, calls.check_other_collectives):
        assert call_all(ranks, check) == [[]] * size
