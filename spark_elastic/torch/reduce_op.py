"""What a reduction computes, under Horovod's names. Values only."""

from __future__ import annotations

import enum


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
