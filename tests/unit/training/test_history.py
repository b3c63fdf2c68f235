from __future__ import annotations

import numpy as np
import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.training import evaluation
from spark_elastic.training.step_summary import StepDecision


def decision(loss: float, denominator: float, rows: int) -> StepDecision:
    none = np.zeros(0, np.bool_)
    return StepDecision(1, rows, loss, denominator, none, none, 0)


def test_an_entry_sums_up_the_steps_of_worlds_of_several_sizes() -> None:
    sums = evaluation.begun()
    evaluation.add_step(sums, decision(6.0, 4.0, 4), steps=1, size=2, seconds=0.5)
    evaluation.add_step(sums, decision(2.0, 4.0, 4), steps=2, size=3, seconds=0.25)
    evaluation.add_step(sums, decision(4.0, 4.0, 3), steps=3, size=2, seconds=0.25)

    assert evaluation.entry(sums, epoch=5, planned=12) == {
        "epoch": 5,
        "loss": 1.0,
        "rows": 11,
        "planned": 12,
        "steps": 3,
        "seconds": 1.0,
        "worlds": [2, 3],
    }


def test_a_loss_that_is_a_sum_is_averaged_over_the_steps() -> None:
    sums = evaluation.begun()
    for steps in (1, 2):
        evaluation.add_step(sums, decision(3.0, 0.0, 4), steps, size=1, seconds=0.0)

    assert evaluation.mean_loss(sums, sums["steps"]) == 3.0


def test_figures_are_the_floats_but_for_the_time() -> None:
    assert evaluation.figures({"epoch": 1, "loss": 0.5, "seconds": 2.0, "worlds": [2]}) == {"loss": 0.5}


def test_the_history_keeps_plain_values() -> None:
    entry = {"a": np.int64(3), "b": np.arange(2), "c": np.float32(0.5)}

    assert evaluation.recorded(entry) == {"a": 3, "b": [0, 1], "c": 0.5}
    with pytest.raises(InvalidInput, match="a callback added a set to logs"):
        evaluation.recorded({"a": {1}})
