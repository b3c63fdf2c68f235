"""Rows by their global numbers: those that a plan gives to a rank in a step, and the values of all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import DataPlan, EpochPermutation, Int64s
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store


def list_row_ids(
    plan: DataPlan, order: EpochPermutation | int, step: int, rank: int = 0, size: int = 1
) -> Int64s:
    """order: an epoch, or its permutation."""
    order = plan.permute_epoch(order) if isinstance(order, int) else order
    block = order.assign_block(step, 1, rank, plan.divide(size))
    ids = [plan.group_offsets[group] + rows for lane in block.lanes for group, rows in lane.runs]
    return np.concatenate([np.empty(0, np.int64), *ids])


def read_columns(
    store: Store, manifest: Manifest, names: Sequence[str] | None = None, reader: str = "arrow"
) -> dict[str, Any]:
    """Column -> the values of all rows, by our own reader."""
    with closing(open_reader(reader, store, manifest, names)) as opened:
        groups = [opened.fetch(group) for group in range(len(manifest.row_groups))]
    assert {tuple(len(group[name]) for group in groups) for name in groups[0]} == {manifest.group_rows}
    return {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
