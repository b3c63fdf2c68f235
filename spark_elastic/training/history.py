"""An epoch's sums over its steps, and the entry of the history that is made of them.

The sums are among the state's extras, so that newcomers and checkpoints have them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.training.trailer import Verdict


def begun() -> dict[str, Any]:
    """The sums with which an epoch begins."""
    return {"loss": 0.0, "divisor": 0.0, "rows": 0, "steps": 0, "seconds": 0.0, "sizes": []}


def add_step(sums: dict[str, Any], verdict: Verdict, steps: int, size: int, seconds: float) -> None:
    """Add a step that was applied. steps: of the epoch so far. size: workers of the world. seconds: that it took."""
    sums["loss"] += verdict.loss
    sums["divisor"] += verdict.denominator
    sums["rows"] += verdict.rows
    sums["steps"] = steps
    sums["seconds"] += seconds
    if size not in sums["sizes"]:
        sums["sizes"].append(size)


def entry(sums: Mapping[str, Any], epoch: int, planned: int) -> dict[str, Any]:
    """The epoch in numbers. planned: rows that the steps taken were to have."""
    return {
        "epoch": epoch,
        "loss": mean_loss(sums, sums["steps"]),
        "rows": sums["rows"],
        "planned": planned,
        "steps": sums["steps"],
        "seconds": sums["seconds"],
        "worlds": sums["sizes"],
    }


def mean_loss(sums: Mapping[str, Any], steps: int) -> float:
    """The mean loss of an epoch. A loss that its user wants summed has no divisor: then the mean over the steps."""
    mean: float = sums["loss"] / (sums["divisor"] or steps)
    return mean


def figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """What of an entry can be shown as the progress of the next epoch: losses of validation, metrics, learning rate."""
    return {name: value for name, value in entry.items() if isinstance(value, float) and name != "seconds"}


def recorded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry as plain JSON values; callbacks may have added numbers of numpy or torch.

    Raises:
        InvalidInput: a callback added something that the history cannot keep.
    """

    def listed(value: Any) -> Any:
        if not hasattr(value, "tolist"):
            raise InvalidInput(
                "the history keeps numbers, strings, and lists of them: a callback added a "
                f"{type(value).__name__} to logs."
            )
        return value.tolist()

    kept: dict[str, Any] = json.loads(json.dumps(entry, default=listed))
    return kept
