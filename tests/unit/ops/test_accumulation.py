"""Which backward passes make a step, and what becomes of unfinished steps when their world ends."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.horovod.ops import distributed_optimizer
from spark_elastic.horovod.ops.distributed_optimizer import GradientAccumulator, validate_backward_passes


def make_accumulator(passes: int, average: bool = False) -> GradientAccumulator[Array]:
    return GradientAccumulator(passes, average, lambda arrays: [array.copy() for array in arrays])


def add(accumulator: GradientAccumulator[Array], *values: float | None) -> list[float | None] | None:
    sums = accumulator.add([None if value is None else np.array(value) for value in values])
    return None if sums is None else [None if total is None else float(total) for total in sums]


def test_sums_are_not_written_into_the_gradients_of_a_pass() -> None:
    accumulator, first = make_accumulator(2), np.array([1.0])
    accumulator.add([first])
    accumulator.add([np.array([2.0])])
    assert first.tolist() == [1.0]


def test_a_new_world_starts_a_new_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(fence=(1, 1))
    monkeypatch.setattr(distributed_optimizer, "world", lambda: world)
    accumulator = make_accumulator(2)
    assert add(accumulator, 1.0) is None
    world.fence = (1, 2)
    assert [add(accumulator, 2.0), add(accumulator, 4.0)] == [None, [6.0]]


def test_a_step_has_at_least_one_backward_pass() -> None:
    assert validate_backward_passes(1) == 1
    with pytest.raises(InvalidInput, match="at least 1; got 0"):
        make_accumulator(0)
