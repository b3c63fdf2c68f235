"""A step's rows among the ranks: counted by rank, whole in rank order, and gone once they are given up or taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elastic_collectives import CollectiveError, Group
from spark_elastic.training.batch import MetricRows
from tests.unit.torch.worlds import run_in_world


def fill_rows(rank: int) -> MetricRows:
    """As many rows as the rank has, in parts of one."""
    part = MetricRows()
    for row in range(rank):
        part.add({"loss": (0.5 * rank, 1)}, [np.array([10 * rank + row]), np.full((1, 2), rank)])
    return part


@pytest.mark.native
def test_every_rank_gets_all_rows_of_the_step_in_rank_order() -> None:
    def take_rows(group: Group) -> Any:
        part = fill_rows(group.rank)
        part.gather(group)
        told, (numbers, pairs) = part.pop_gathered()
        return told, numbers.tolist(), pairs.tolist(), part.pop_gathered()

    counted = [{"loss": [0.5, 1]}, {"loss": [1.0, 1]}, {"loss": [1.0, 1]}]
    assert run_in_world(3, take_rows) == [(counted, [10, 20, 21], [[1, 1], [2, 2], [2, 2]], ([], []))] * 3


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
