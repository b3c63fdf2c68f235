"""What travels together, what a joined rank adds, what arguments come to, which backward passes make a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from elastic_collectives import Group
from elastic_collectives.operands import Array
from spark_elastic.clock import SystemClock
from spark_elastic.config import OperationConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients import reduction as ops
from spark_elastic.gradients.flat_allreduce import ALIGN, FlatAllreduce, FlatBuffer
from spark_elastic.gradients.process_sets import SingleProcessGroup, global_process_set
from spark_elastic.horovod.ops import distributed_optimizer
from spark_elastic.horovod.ops.distributed_optimizer import GradientAccumulator
from spark_elastic.horovod.ops.negotiation import OperationRequest
from spark_elastic.horovod.ops.operation_queue import OperationQueue, Task, fuse_tasks, make_neutral_arrays
from tests.fake_group import FakeFabric
from tests.reductions import reduce_parts
from tests.unit.torch.worlds import run_in_world

DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64")


def reduction(name: str, length: int = 1, dtype: str = "float32", op: str = "sum") -> OperationRequest:
    return OperationRequest("allreduce", name, (dtype,), ((length,),), op)


def test_small_reductions_of_a_kind_go_together_up_to_the_threshold() -> None:
    requests = [
        reduction("a", 10), reduction("wide", 10, "float64"), reduction("b", 10), reduction("big", 1 << 20),
        reduction("c", 10), reduction("max", 1, op="max"), reduction("s1", 1, op="adasum"),
        reduction("s2", 1, op="adasum"), OperationRequest("barrier", "barrier"),
    ]  # fmt: skip
    tasks = [Task(request.name or "", request, None) for request in requests]
    told = [[task.label for task in batch] for batch in fuse_tasks(tasks, 100)]
    assert sorted(told) == [
        ["a", "b"], ["barrier"], ["big"], ["c"], ["max"], ["s1"], ["s2"], ["wide"],
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_the_neutral_arrays_of_a_joined_rank_change_no_result(op: str, dtype: str) -> None:
    group = cast("Group", FakeFabric(1).group(0))
    (added,) = make_neutral_arrays(reduction("x", 3, dtype, op))
    values = np.array([0, 1, 1]) if dtype != "bfloat16" else np.array([0, 0x3F80, 0xC000])
    own = values.astype("uint16" if dtype == "bfloat16" else dtype)
    assert added.dtype == own.dtype
    assert reduce_parts([own, added], dtype, op, 1.0).tolist() == own.tolist()
    factors = {"min": (-2.0, 0.0)}.get(op, (-2.0,)) if dtype == "float32" else ()
    for factor in factors:  # also after the prescale
        request = OperationRequest("allreduce", "x", ("float32",), ((3,),), op, (factor, 1.0))
        (added,) = make_neutral_arrays(request)
        scaled = [np.float32(factor) * array for array in (own, added)]
        assert reduce_parts(scaled, "float32", op, 1.0).tolist() == scaled[0].tolist()
    group.close()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_world_of_one_scales_as_a_group_does(dtype: str) -> None:
    kind = "uint16" if dtype == "bfloat16" else dtype
    request = OperationRequest("allreduce", "x", (dtype,), ((2,),), "average", (2.0, 0.5))
    results = []
    for group in (cast("Group", SingleProcessGroup()), FakeFabric(1).group(0)):
        array = np.array([16256, 4] if dtype == "bfloat16" else [3, 4]).astype(kind)
        queue = OperationQueue(group, SystemClock(), OperationConfig())
        results.append(queue.submit(request, [array]).wait()[0].tolist())
    assert results[0] == results[1]


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
