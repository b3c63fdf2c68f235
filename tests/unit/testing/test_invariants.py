from __future__ import annotations

import pytest

from spark_elastic.protocol.types import Fence
from tests.simulator.invariants import StepHistory, Violation
from tests.unit.protocol.driver_bench import at


def _history() -> StepHistory:
    history = StepHistory()
    history.record_applied(Fence(1, 1), at(0), (0, 1))
    history.record_applied(Fence(1, 1), at(1), (2, 3))
    history.record_applied(Fence(1, 2), at(1), (3, 2))  # one that died had applied it alone
    return history


def test_the_highest_generation_counts() -> None:
    _history().check({at(0): (0, 1), at(1): (2, 3)})
    assert _history().compute_final_rows()[at(1)] == (3, 2)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({at(0): (0, 1), at(1): (2, 3), at(2): (4, 5)}, "never applied"),
        ({at(0): (0, 1), at(1): (2, 4)}, "were trained, not"),
        ({at(0): (0, 1)}, "were trained, not"),
    ],
)
def test_a_missing_or_foreign_row_is_a_violation(
    expected: dict[object, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(Violation, match=message):
        _history().check(expected)  # type: ignore[arg-type]


def test_ranks_that_disagree_are_a_violation() -> None:
    with pytest.raises(Violation, match="two ranks of world 1"):
        _history().record_applied(Fence(1, 1), at(0), (0,))
