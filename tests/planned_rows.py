"""The rows that a plan gives to a rank in a step, by their global numbers."""

from __future__ import annotations

import numpy as np

from spark_elastic.data.plan import DataPlan, EpochPermutation, Int64s


def list_row_ids(
    plan: DataPlan, order: EpochPermutation | int, step: int, rank: int = 0, size: int = 1
) -> Int64s:
    """order: an epoch, or its permutation."""
    order = plan.permute_epoch(order) if isinstance(order, int) else order
    block = order.assign_block(step, 1, rank, plan.divide(size))
    ids = [plan.group_offsets[group] + rows for lane in block.lanes for group, rows in lane.runs]
    return np.concatenate([np.empty(0, np.int64), *ids])
