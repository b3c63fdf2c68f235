"""What a training tells of its steps, and the loss that ends it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.protocol.types import INITIAL_VERSION, Phase, Position
from spark_elastic.training.progress import StepSums, TrainingProgress, select_figures, to_json_values


def decision(loss: float, denominator: float = 4.0, rows: int = 4) -> StepDecision:
    none = np.zeros(0, np.bool_)
    return StepDecision(INITIAL_VERSION, rows, loss, denominator, none, none, 0)


def test_an_entry_sums_up_the_steps_of_worlds_of_several_sizes() -> None:
    sums = StepSums()
    sums.add(decision(6.0, 4.0, 4), world_size=2, seconds=0.5)
    sums.add(decision(2.0, 4.0, 4), world_size=3, seconds=0.25)
    sums.add(decision(4.0, 4.0, 3), world_size=2, seconds=0.25)

    entry = {"epoch": 5, "loss": 1.0, "rows": 11, "planned": 12, "steps": 3, "seconds": 1.0, "worlds": [2, 3]}
    assert sums.history_entry(epoch=5, planned=12) == entry
    assert select_figures(entry) == {"loss": 1.0}, "a float, and no time"


def test_the_history_keeps_plain_values() -> None:
    entry = {"a": np.int64(3), "b": np.arange(2), "c": np.float32(0.5)}

    assert to_json_values(entry) == {"a": 3, "b": [0, 1], "c": 0.5}
    with pytest.raises(InvalidInput, match="a callback added a set to logs"):
        to_json_values({"a": {1}})


def test_progress_comes_back_from_its_plain_values() -> None:
    progress = TrainingProgress(history=[{"epoch": 0, "loss": 0.5}], stop_reason="early", has_warned=True)
    progress.epoch.add(decision(6.0, 4.0, 4), world_size=2, seconds=0.5)
    progress.pending_logs = {"epoch": 1, "step": 0}

    values = progress.to_values()

    assert TrainingProgress.from_values(values) == progress
    progress.epoch.add(decision(6.0, 4.0, 4), world_size=3, seconds=0.5)
    assert TrainingProgress.from_values(values) != progress, "the values share something with the progress"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_nan_is_an_error_with_its_step(loss: float) -> None:
    says = rf"the loss became {loss} in step 7 of epoch 3: .* learning rate.*=False continues"
    with pytest.raises(FloatingPointError, match=says):
        decision(loss).check_finite(Position(2, Phase.TRAIN, 7))
    decision(-1e300).check_finite(Position(0, Phase.TRAIN, 0))
