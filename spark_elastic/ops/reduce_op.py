"""What a reduction computes, under Horovod's names. Values only."""

from __future__ import annotations

import enum

from spark_elastic.errors import InvalidInput


class ReduceOp(enum.Enum):
    """What becomes of the ranks' tensors; the value is the engine's name for it."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def chosen(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The reduction that the two arguments stand for.

    Raises:
        InvalidInput: both are given, or `op` is no ReduceOp.
    """
    if average is not None and op is not None:
        raise InvalidInput("take either average or op; op is the newer one: leave average out.")
    if op is not None and not isinstance(op, ReduceOp):
        raise InvalidInput(f"op must be Average, Sum, Adasum, Min, Max or Product; got {op!r}.")
    return op if op is not None else (Sum if average is False else Average)
