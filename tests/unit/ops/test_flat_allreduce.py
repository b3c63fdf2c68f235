"""Arrays in one flat buffer: where they lie, and what their sums over the ranks are."""

from __future__ import annotations

import numpy as np
import pytest

from elastic_collectives import Group
from spark_elastic.gradients.flat_allreduce import ALIGN, FlatAllreduce, FlatBuffer
from tests.unit.torch.worlds import run_in_world


def test_arrays_of_one_dtype_lie_next_to_each_other_and_begin_aligned() -> None:
    buffer = FlatBuffer([(2, 3), (4,), (), (0,)], ["float32", "float64", "float32", "int64"])
    assert [(flat.dtype.name, len(flat)) for flat in buffer.flat] == [
        ("float32", ALIGN // 4 + 1),
        ("float64", 4),
        ("int64", 0),
    ]
    assert [view.shape for view in buffer.views] == [(2, 3), (4,), (), (0,)]
    assert all(view.ctypes.data % ALIGN == 0 for view in buffer.views if view.size)


def test_filling_copies_arrays_in_and_writes_zeros_for_none() -> None:
    buffer = FlatBuffer([(2,), (2,)], ["float32", "float32"])
    buffer.fill([np.array([1, 2], np.float32), np.array([3, 4], np.float32)])
    buffer.fill([None, np.array([5, 6], np.float32)])
    assert [view.tolist() for view in buffer.views] == [[0.0, 0.0], [5.0, 6.0]]


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
