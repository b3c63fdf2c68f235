"""A rank's part of a step, and its rows for metrics: whole, in rank order, gone once they are given up or taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.training.batch import LocalBatch, MetricRows
from tests.unit.torch.worlds import run_in_world

ROWS = np.arange(30.0).reshape(10, 3)


@pytest.mark.parametrize("made", [np.asarray, torch.from_numpy])
def test_micro_batches_hold_every_row_once(made: Callable[[Any], Any]) -> None:
    share = LocalBatch(25, np.arange(10), (made(ROWS),), (made(ROWS[:, 0]),), made(ROWS[:, 1]))
    parts = list(share.micro_batches(4))
    assert [len(part) for part in parts] == [3, 3, 4]
    assert np.array_equal(np.concatenate([part.row_ids for part in parts]), share.row_ids)
    assert np.array_equal(np.concatenate([part.features[0] for part in parts]), ROWS)
    assert np.array_equal(np.concatenate([part.labels[0] for part in parts]), ROWS[:, 0])
    assert np.array_equal(
        np.concatenate([part.weights for part in parts if part.weights is not None]), ROWS[:, 1]
    )
    assert {part.planned for part in parts} == {25}


@pytest.mark.parametrize("made", [np.asarray, torch.from_numpy])
def test_a_batch_has_weight_if_one_of_its_rows_has(made: Callable[[Any], Any]) -> None:
    zeros, some = made(np.zeros(3)), made(np.array([0.0, 0.5, 0.0]))
    batches = [LocalBatch(3, np.arange(3), (), (), each) for each in (zeros, some)]
    assert [each.has_weight for each in batches] == [False, True]
    assert LocalBatch(3, np.arange(3), (), (), zeros, shares=tuple(batches)).has_weight
    assert not LocalBatch(3, np.arange(3), (), (), some, on_host=((), zeros)).has_weight
    assert LocalBatch(3, np.arange(3), (), (), None).has_weight


def fill_rows(rank: int) -> MetricRows:
    """As many rows as the rank has, in parts of one."""
    part = MetricRows()
    for row in range(rank):
        part.add({"loss": (0.5 * rank, 1)}, [np.array([10 * rank + row]), np.full((1, 2), rank)])
    return part


@pytest.mark.native
def test_metric_rows_may_have_no_columns() -> None:
    def take_rows(group: Group) -> Any:
        part = MetricRows()
        part.add({"loss": (1.5, 3)}, None)
        part.gather(group)
        return part.pop_gathered()

    assert run_in_world(2, take_rows) == [([{"loss": [1.5, 3]}] * 2, [])] * 2


def test_neither_a_broken_exchange_nor_a_discard_leaves_rows() -> None:
    class BrokenGroup:
        def allgather_bytes(self, data: bytes) -> list[bytes]:
            raise CollectiveError([1], "gone")

    class Echo:
        def allgather_bytes(self, data: bytes) -> list[bytes]:
            return [data]

    part: Any = fill_rows(2)
    with pytest.raises(CollectiveError):
        part.gather(BrokenGroup())
    part.gather(Echo())
    assert part.pop_gathered() == ([], [])
    discarded = fill_rows(2)
    discarded.discard()
    assert discarded.pop_gathered() == ([], [])
