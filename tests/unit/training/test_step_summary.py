from __future__ import annotations

import math

import numpy as np
import pytest

from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.protocol.types import INITIAL_VERSION, Phase, Position


def decision(loss: float) -> StepDecision:
    none = np.zeros(0, np.bool_)
    return StepDecision(INITIAL_VERSION, 4, loss, 4.0, none, none, 0)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_nan_is_an_error_with_its_step(loss: float) -> None:
    with pytest.raises(
        FloatingPointError,
        match=rf"the loss became {loss} in step 7 of epoch 3: .* learning rate.*=False continues",
    ):
        decision(loss).check_finite(Position(2, Phase.TRAIN, 7))


def test_any_finite_loss_is_accepted() -> None:
    decision(-1e300).check_finite(Position(0, Phase.TRAIN, 0))
