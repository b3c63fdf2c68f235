"""What arguments of reductions come to, flat buffers, which backward passes make a step; process sets, by ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastic_collectives import Group
from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients import reduction as ops
from spark_elastic.gradients.flat_allreduce import ALIGN, FlatAllreduce, FlatBuffer
from spark_elastic.gradients.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    is_process_set_included,
    remove_process_set,
    reset_process_sets,
)
from spark_elastic.horovod.ops import distributed_optimizer
from spark_elastic.horovod.ops.distributed_optimizer import GradientAccumulator
from spark_elastic.horovod.ops.negotiation import OperationRequest
from spark_elastic.horovod.ops.operations import get_queue
from tests.fake_group import FakeFabric
from tests.worlds import enter_group, run_in_fake_world, run_in_world


class HalfPrecision(ops.Compressor):
    wire = "fp16"


@pytest.mark.parametrize(
    ("op", "predivide", "says"),
    [
        (ops.Max, 1.0, "op must be Average, Sum or Adasum; got"),
        (ops.Average, 0.0, "must be above 0"),
        (ops.Sum, 2.0, "left out with op=Sum"),
        (ops.Adasum, 2.0, "and op=Adasum"),
    ],
)
def test_exchanges_of_gradients_refuse_wrong_arguments(op: ops.ReduceOp, predivide: float, says: str) -> None:
    assert ops.ReduceOptions.from_gradient_args(ops.Average, 2, global_process_set).scale == (0.5, 2.0)
    with pytest.raises(InvalidInput, match=says):
        ops.ReduceOptions.from_gradient_args(op, predivide, global_process_set)


@pytest.mark.parametrize(
    ("op", "compression", "all_float32", "wire"),
    [
        (ops.Sum, HalfPrecision, True, "fp16"),
        (ops.Sum, HalfPrecision, False, None),
        (ops.Adasum, HalfPrecision, True, None),
        (ops.Sum, ops.Compressor, True, None),
    ],
)
def test_only_float32_has_a_wire_format(
    op: ops.ReduceOp, compression: type[ops.Compressor], all_float32: bool, wire: str | None
) -> None:
    assert ops.ReduceOptions(op, compression=compression).choose_wire_format(all_float32) == wire


def test_the_gradient_factor_of_a_reducescatter() -> None:
    def fail_if_asked() -> int:
        raise AssertionError("an average's factor does not depend on the size")

    assert ops.ReduceOptions(ops.Sum, (0.5, 3.0)).reducescatter_gradient_factor(lambda: 4) == 6.0
    assert ops.ReduceOptions(ops.Average, (0.5, 3.0)).reducescatter_gradient_factor(fail_if_asked) == 1.5
    for op in (ops.Min, ops.Max, ops.Product):
        with pytest.raises(InvalidInput, match="has no gradient"):
            ops.ReduceOptions(op).reducescatter_gradient_factor(fail_if_asked)


def make_accumulator(passes: int, average: bool = False) -> GradientAccumulator[Array]:
    return GradientAccumulator(passes, average, lambda arrays: [array.copy() for array in arrays])


def add(accumulator: GradientAccumulator[Array], *values: float | None) -> list[float | None] | None:
    sums = accumulator.add([None if value is None else np.array(value) for value in values])
    return None if sums is None else [None if total is None else float(total) for total in sums]


def test_a_new_world_starts_a_new_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(fence=(1, 1))
    monkeypatch.setattr(distributed_optimizer, "world", lambda: world)
    accumulator = make_accumulator(2)
    assert add(accumulator, 1.0) is None
    world.fence = (1, 2)
    first = np.array(2.0)
    assert accumulator.add([first]) is None
    assert add(accumulator, 4.0) == [6.0]
    assert first == 2.0, "the sum was written into the gradient of a pass"


def test_arrays_of_one_dtype_lie_next_to_each_other_and_begin_aligned() -> None:
    buffer = FlatBuffer([(2, 3), (4,), (), (0,)], ["float32", "float64", "float32", "int64"])
    buffer.fill([np.ones((2, 3), np.float32), np.ones(4), np.array(2.0, np.float32), np.zeros(0, np.int64)])
    buffer.fill([None, np.ones(4), np.array(3.0, np.float32), None])
    assert [float(view.sum()) for view in buffer.views] == [0.0, 4.0, 3.0, 0.0]
    lengths = [("float32", ALIGN // 4 + 1), ("float64", 4), ("int64", 0)]
    assert [(flat.dtype.name, len(flat)) for flat in buffer.flat] == lengths
    assert [view.shape for view in buffer.views] == [(2, 3), (4,), (), (0,)]
    assert all(view.ctypes.data % ALIGN == 0 for view in buffer.views if view.size)


@pytest.mark.parametrize("size", [1, 3])
def test_sums_are_those_of_all_ranks_in_each_dtype(size: int) -> None:
    def work(group: Group) -> list[list[float]]:
        exchange = FlatAllreduce([(2,), (1,)], ["float32", "float64"])
        for _ in range(2):
            mine = [np.full(2, group.rank + 1.0, np.float32), None if group.rank else np.array([0.25])]
            sums = exchange.allreduce(group, mine, None)
        result = [array.tolist() for array in sums]
        exchange.close()
        return result

    total = float(sum(range(1, size + 1)))
    assert run_in_world(size, work) == [[[total, total], [0.25]]] * size


def test_ranks_with_other_shapes_have_another_layout_hash() -> None:
    hashes = [FlatAllreduce([shape], ["float32"]).layout_hash for shape in [(2, 3), (3, 2), (2, 3)]]
    assert hashes[0] == hashes[2] != hashes[1]


pytestmark = pytest.mark.usefixtures("context_per_thread")


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
