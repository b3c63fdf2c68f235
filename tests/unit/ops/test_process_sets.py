"""Process sets: by ranks, in whatever world; operations among their members alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    is_process_set_included,
    remove_process_set,
    reset_process_sets,
)
from spark_elastic.horovod.ops.negotiation import OperationRequest
from spark_elastic.horovod.ops.operations import get_queue
from tests.fake_group import FakeFabric
from tests.unit.ops.workers import enter_group, run_in_fake_world, use_context_per_thread


@pytest.fixture(autouse=True)
def threads_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_context_per_thread(monkeypatch)


def compute_total(process_set: ProcessSet, value: float) -> float:
    array = np.array([value], np.float64)
    request = OperationRequest("allreduce", "x", ("float64",), ((1,),), "sum")
    return float(get_queue(process_set).submit(request, [array]).wait()[0][0])


def test_members_reduce_among_themselves_while_others_do_something_else() -> None:
    def work(group: Group) -> tuple[float, float, int]:
        sets = [add_process_set(ranks) for ranks in ([2, 0], [1, 3])]
        mine = sets[group.rank % 2]
        assert (mine.included(), mine.size(), mine.rank()) == (True, 2, group.rank // 2)
        some = compute_total(mine, group.rank)
        return some, compute_total(global_process_set, group.rank), mine.process_set_id or 0

    assert run_in_fake_world(4, work) == [(2.0, 6.0, 1), (4.0, 6.0, 2)] * 2


def test_a_set_has_the_ranks_that_the_current_world_has() -> None:
    enter_group(FakeFabric(4).group(1))
    pair, late = add_process_set([1, 3]), add_process_set([2, 3])
    enter_group(FakeFabric(2, fence=(1, 2)).group(1))
    assert get_process_set_ids_and_ranks() == {0: [0, 1], 1: [1], 2: []}
    assert (pair.ranks, pair.size(), late.size(), late.included()) == ([1], 1, 0, False)
    assert compute_total(pair, 5.0) == 5.0
    with pytest.raises(InvalidInput, match="rank 1 is not in"):
        get_queue(late)
    enter_group(FakeFabric(4, fence=(1, 3)).group(3))
    assert (pair.ranks, late.rank()) == ([1, 3], 1)


def test_process_sets_are_added_removed_and_reset() -> None:
    enter_group(FakeFabric(3).group(0))
    first = add_process_set(ProcessSet([0, 1]))
    with pytest.raises(InvalidInput, match="was added already"):
        add_process_set([1, 0])
    assert is_process_set_included(0)
    assert is_process_set_included(1)
    assert remove_process_set(first)
    assert not remove_process_set(first)
    assert not remove_process_set(global_process_set)
    with pytest.raises(InvalidInput, match="add_process_set"):
        get_queue(first)
    unknown = ProcessSet([0, 1])
    unknown.process_set_id = 10
    with pytest.raises(InvalidInput, match="add_process_set"):
        get_queue(unknown)
    with pytest.raises(InvalidInput, match="there is no process set 1"):
        is_process_set_included(1)
    assert add_process_set(first).process_set_id == 2
    reset_process_sets([[1, 2], global_process_set])
    assert get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [1, 2]}
    with pytest.raises(InvalidInput, match="rank 0 is not in"):
        next(iter([ProcessSet([1, 2])])).rank()


@pytest.mark.parametrize(("ranks", "says"), [([0, 0], "different"), ([-1], "below 0"), (object(), "no MPI")])
def test_a_process_set_refuses_wrong_ranks(ranks: Any, says: str) -> None:
    enter_group(FakeFabric(2).group(0))
    with pytest.raises(InvalidInput, match=says):
        add_process_set(ranks)


def test_a_process_that_is_no_worker_is_a_world_of_one() -> None:
    assert compute_total(global_process_set, 3.0) == 3.0
    assert (global_process_set.ranks, global_process_set.rank()) == ([0], 0)


def test_a_set_keeps_its_own_names_where_it_comes_to_have_the_ranks_of_another() -> None:
    def work(group: Group) -> tuple[float, ...] | None:
        enter_group(group)
        sets = [add_process_set(ranks) for ranks in ([0, 1], [0, 1, 7])]
        if group.rank > 1:
            return None
        kind = ("float64",), ((1,),), "sum"
        handles = [
            get_queue(one).submit(OperationRequest("allreduce", "loss", *kind), [np.array([10.0**place])])
            for place, one in enumerate([global_process_set, *sets])
        ]
        return tuple(float(handle.wait()[0][0]) for handle in handles)

    assert run_in_fake_world(2, work) == [(2.0, 20.0, 200.0)] * 2
