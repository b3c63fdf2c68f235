"""What Horovod's arguments of a reduction come to: the reduction, how it travels, and its gradient's factor."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import global_process_set
from spark_elastic.gradients.reduction import (
    Adasum,
    Average,
    Compressor,
    Max,
    Min,
    Product,
    ReduceOp,
    ReduceOptions,
    Sum,
)


class HalfPrecision(Compressor):
    wire = "fp16"


@pytest.mark.parametrize(("count", "op"), [(0, Sum), (1, Adasum), (1, "sum")])
def test_reducescatter_refuses_other_reductions_and_no_tensors(count: int, op: Any) -> None:
    with pytest.raises(InvalidInput, match="takes tensors, and Average, Sum, Min, Max or Product"):
        ReduceOptions.from_reducescatter_args(count, op, (1.0, 1.0), global_process_set)


@pytest.mark.parametrize(
    ("op", "predivide", "says"),
    [
        (Max, 1.0, "op must be Average, Sum or Adasum; got"),
        (Average, 0.0, "must be above 0"),
        (Sum, 2.0, "left out with op=Sum"),
        (Adasum, 2.0, "and op=Adasum"),
    ],
)
def test_exchanges_of_gradients_refuse_wrong_arguments(op: ReduceOp, predivide: float, says: str) -> None:
    assert ReduceOptions.from_gradient_args(Average, 2, global_process_set).scale == (0.5, 2.0)
    with pytest.raises(InvalidInput, match=says):
        ReduceOptions.from_gradient_args(op, predivide, global_process_set)


@pytest.mark.parametrize(
    ("op", "compression", "all_float32", "wire"),
    [
        (Sum, HalfPrecision, True, "fp16"),
        (Sum, HalfPrecision, False, None),
        (Adasum, HalfPrecision, True, None),
        (Sum, Compressor, True, None),
    ],
)
def test_only_float32_has_a_wire_format(
    op: ReduceOp, compression: type[Compressor], all_float32: bool, wire: str | None
) -> None:
    assert ReduceOptions(op, compression=compression).choose_wire_format(all_float32) == wire


def test_the_gradient_factor_of_a_reducescatter() -> None:
    def fail_if_asked() -> int:
        raise AssertionError("an average's factor does not depend on the size")

    assert ReduceOptions(Sum, (0.5, 3.0)).reducescatter_gradient_factor(lambda: 4) == 6.0
    assert ReduceOptions(Average, (0.5, 3.0)).reducescatter_gradient_factor(fail_if_asked) == 1.5
    for op in (Min, Max, Product):
        with pytest.raises(InvalidInput, match="has no gradient"):
            ReduceOptions(op).reducescatter_gradient_factor(fail_if_asked)
