"""Validation after an epoch: every row counts once, whoever joins, leaves or dies meanwhile.

Its steps have positions and trailers as those of training do (R6), so that a drain does not wait for the epoch's end
and a broken step is taken again. Sums are part of the state. Main thread only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Phase, Position, World
from spark_elastic.training.spec import Rows, TrainSpec
from spark_elastic.training.step_summary import StepDecision
from spark_elastic.training.trainer import ModelTrainer
from spark_elastic.worker.program import WorkerHandle

# An epoch's sums over its steps, and the entry of the history that is made of them.
#
# The sums are among the state's extras, so that newcomers and checkpoints have them. Pure.


def begun() -> dict[str, Any]:
    """The sums with which an epoch begins."""
    return {"loss": 0.0, "divisor": 0.0, "rows": 0, "steps": 0, "seconds": 0.0, "sizes": []}


def add_step(sums: dict[str, Any], decision: StepDecision, steps: int, size: int, seconds: float) -> None:
    """Add a step that was applied. steps: of the epoch so far. size: workers of the world. seconds: that it took."""
    sums["loss"] += decision.loss
    sums["divisor"] += decision.denominator
    sums["rows"] += decision.rows
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


class Evaluation:
    """The validation of one model on one data set. `run` takes the steps that are left of the position's epoch."""

    def __init__(
        self, spec: TrainSpec, rows: Rows, trainer: ModelTrainer, sealed: Callable[[World, int], None]
    ) -> None:
        """sealed: called when an exchange is complete, which says that the step before it is history (R1)."""
        self._rows, self._trainer, self._sealed = rows, trainer, sealed
        self._reader, self._loader = spec.open_reader(rows)

    def run(self, world: World, group: Group, handle: WorkerHandle) -> bool:
        """Take the steps that are left. False if it stopped at a boundary."""
        trainer, here = self._trainer, self._trainer.state.position
        with (
            trainer.validation_mode(),
            self._loader.steps(0, here.step, group.rank, group.size) as steps,
        ):
            for rows in steps:
                decision = trainer.validation_step(group, rows, handle.membership_version())
                self._count(decision)
                handle.report_position(trainer.state.position)
                self._sealed(world, decision.version)
                if decision.version > world.version:
                    return False
        return True

    def numbers(self) -> dict[str, Any]:
        """The numbers of the epoch whose steps were taken. Without a loss if the model reports none."""
        sums = self._trainer.state.extras["validation"]
        known = not math.isnan(sums["divisor"])
        loss = {"val_loss": mean_loss(sums, self._rows.plan.steps)} if known else {}
        return {**loss, "val_rows": sums["rows"]}

    def close(self) -> None:
        self._reader.close()

    def _count(self, decision: StepDecision) -> None:
        state = self._trainer.state
        sums, here = state.extras["validation"], state.position
        sums["loss"] += decision.loss
        sums["divisor"] += decision.denominator
        sums["rows"] += decision.rows
        last = here.step + 1 == self._rows.plan.steps
        state.position = (
            Position(here.epoch, Phase.CLOSE, 0) if last else Position(here.epoch, here.phase, here.step + 1)
        )


def no_sums() -> dict[str, float]:
    """The sums with which an epoch's validation begins."""
    return {"loss": 0.0, "divisor": 0.0, "rows": 0}
