"""What travels together, what a joined rank adds, and what a world of one computes."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from elastic_collectives import Group
from spark_elastic.clock import SystemClock
from spark_elastic.config import OperationConfig
from spark_elastic.gradients.process_sets import SingleProcessGroup
from spark_elastic.horovod.ops.negotiation import OperationRequest
from spark_elastic.horovod.ops.operation import CompletionSignal, Task, fuse_tasks, make_neutral_arrays
from spark_elastic.horovod.ops.operation_queue import OperationQueue
from tests.fake_group import FakeFabric

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
    from tests.reductions import reduce_parts

    assert reduce_parts([own, added], dtype, op, 1.0).tolist() == own.tolist()
    group.close()


@pytest.mark.parametrize(("op", "factor"), [("min", -1.0), ("max", -2.0), ("product", 2.0), ("min", 0.0)])
def test_what_a_joined_rank_contributes_is_neutral_after_the_prescale(op: str, factor: float) -> None:
    from tests.reductions import reduce_parts

    request = OperationRequest("allreduce", "x", ("float32",), ((3,),), op, (factor, 1.0))
    (added,) = make_neutral_arrays(request)
    own = np.array([1.0, -3.0, 0.5], np.float32) * np.float32(factor)
    assert reduce_parts([own, added * np.float32(factor)], "float32", op, 1.0).tolist() == own.tolist()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_world_of_one_scales_as_a_group_does(dtype: str) -> None:
    kind = "uint16" if dtype == "bfloat16" else dtype
    request = OperationRequest("allreduce", "x", (dtype,), ((2,),), "average", (2.0, 0.5))
    results = []
    for group in (cast("Group", SingleProcessGroup()), FakeFabric(1).group(0)):
        array = np.array([16256, 4] if dtype == "bfloat16" else [3, 4]).astype(kind)
        results.append(
            OperationQueue(group, CompletionSignal(SystemClock()), OperationConfig())
            .submit(request, [array])
            .wait()[0]
            .tolist()
        )
    assert results[0] == results[1]
