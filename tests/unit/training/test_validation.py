"""The sums of an epoch's validation, and what they say of its loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.protocol.types import Phase, Position
from spark_elastic.training.loop import Validation
from spark_elastic.training.progress import TrainingProgress


def numbers(*steps: tuple[float, float], has_weight: bool = True) -> dict[str, Any]:
    """steps: their (sum of losses, denominator); ten rows each."""
    validation: Any = object.__new__(Validation)
    state = SimpleNamespace(position=Position(0, Phase.VALIDATE, 0), progress=TrainingProgress())
    validation._trainer = SimpleNamespace(state=state)
    validation._rows = SimpleNamespace(plan=SimpleNamespace(steps=len(steps)))
    for loss, denominator in steps:
        decision = SimpleNamespace(loss=loss, denominator=denominator, rows=10, has_weight=has_weight)
        validation._record_step(decision, 1)
    found: dict[str, Any] = validation.results()
    return found


@pytest.mark.parametrize(
    ("steps", "loss"),
    [
        ([(20.0, 10.0), (10.0, 10.0)], 1.5),
        ([(0.5, 0.25), (0.0, 0.0), (0.0, 0.0), (1.5, 0.75)], 2.0),  # steps whose rows have no weight
        ([(20.0, 0.0), (10.0, 0.0)], 15.0),  # a loss that its user wants summed
        ([(0.0, 0.0), (0.0, 0.0)], 0.0),
    ],
)
def test_validation_computes_the_mean_of_an_epoch(steps: list[tuple[float, float]], loss: float) -> None:
    assert numbers(*steps) == {"val_loss": loss, "val_rows": 10 * len(steps)}


@pytest.mark.parametrize("denominator", [10.0, 0.0])
def test_there_is_no_mean_where_all_sample_weights_are_zero(denominator: float) -> None:
    found = numbers((0.0, denominator), (0.0, denominator), has_weight=False)
    assert math.isnan(found["val_loss"])


def test_a_model_without_a_validation_loss_gets_none() -> None:
    assert numbers((0.0, math.nan), (0.0, math.nan)) == {"val_rows": 20}
