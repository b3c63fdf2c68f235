"""pygloo as a group: every operation agrees with numpy and with the engine in the same processes; a death is told."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from tests.component.collectives import calls
from tests.component.collectives.ranks import Failed, Member, Pool, answers, call_all

pytest.importorskip("pygloo", reason="pygloo has wheels for CPython up to 3.10: nox -s pygloo")
pytestmark = [pytest.mark.pygloo, pytest.mark.timeout(300)]


def move_to_pygloo(member: Member) -> None:
    """From the engine's group to one of pygloo's, whose addresses travel over it."""
    from tests.pygloo_group import connect

    old = member.live
    member.group = connect("127.0.0.1", old.rank, old.size, old.fence, old.allgather_bytes)
    old.close()


def results(member: Member) -> list[Any]:
    """Exact ones: whole numbers, and floats that are compared rather than summed."""
    group, found = member.live, []
    for dtype in ("int8", "uint64", "int32", "float32", "float64"):
        for op in ("sum", "min", "max", "product", "average") if dtype[0] != "f" else ("min", "max"):
            array = calls.share(group.rank, 1023, dtype)
            group.allreduce(array, op)
            found.append(array)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_operation_agrees_with_numpy_and_with_the_engine(pool: Pool, size: int) -> None:
    ranks = pool.take(size)
    pool.world(ranks, timeout=120)
    ours = call_all(ranks, results)
    assert call_all(ranks, move_to_pygloo) == [None] * size
    for mine, theirs in zip(ours, call_all(ranks, results), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    found = call_all(ranks, calls.reduce_everything)
    assert [wrong for wrong, _ in found] == [[]] * size
    assert len({digest for _, digest in found}) == 1
    for check in (calls.reduce_in_chunks, calls.exchange_everything, calls.check_other_collectives):
        assert call_all(ranks, check) == [[]] * size


def test_a_mismatch_and_a_death_are_errors(pool: Pool) -> None:
    ranks = pool.take(3)
    pool.world(ranks)
    call_all(ranks, move_to_pygloo)
    for end in call_all(ranks, calls.reduce_own_size, [3, 3, 4], "ring"):
        assert isinstance(end, Failed)
        assert end.kind == "MismatchError"
    pool.world(ranks)
    call_all(ranks, move_to_pygloo)
    for rank in ranks:
        rank.call(calls.work_until_it_fails, "ring", 1, signal.SIGKILL)
    for end in answers([ranks[0], ranks[2]]):
        assert end.kind == "PeerLost"
    assert os.waitid(os.P_PID, ranks[1].process.pid, os.WEXITED | os.WNOWAIT) is not None
