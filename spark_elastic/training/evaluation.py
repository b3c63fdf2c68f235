"""Validation after an epoch: every row counts once, whoever joins, leaves or dies meanwhile.

Its steps have positions and trailers as those of training do (R6), so that a drain does not wait for the epoch's end
and a broken step is taken again. Sums are part of the state. Main thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from elastic_collectives import Group
from spark_elastic.protocol.types import Phase, Position, World
from spark_elastic.training.history import mean_loss
from spark_elastic.training.learner import Learner
from spark_elastic.training.spec import Rows, TrainSpec
from spark_elastic.training.trailer import Verdict
from spark_elastic.worker.program import Session


class Evaluation:
    """The validation of one model on one data set. `run` takes the steps that are left of the position's epoch."""

    def __init__(
        self, spec: TrainSpec, rows: Rows, learner: Learner, sealed: Callable[[World, int], None]
    ) -> None:
        """sealed: called when an exchange is complete, which says that the step before it is history (R1)."""
        self._rows, self._learner, self._sealed = rows, learner, sealed
        self._reader, self._loader = spec.opened(rows)

    def run(self, world: World, group: Group, session: Session) -> bool:
        """Take the steps that are left. False if it stopped at a boundary."""
        learner, here = self._learner, self._learner.state.position
        with (
            learner.evaluating(),
            self._loader.steps(0, here.step, group.rank, group.size) as steps,
        ):
            for rows in steps:
                verdict = learner.evaluate(group, rows, session.membership_version())
                self._count(verdict)
                session.tell(learner.state.position)
                self._sealed(world, verdict.version)
                if verdict.version > world.version:
                    return False
        return True

    def numbers(self) -> dict[str, Any]:
        """The numbers of the epoch whose steps were taken. Without a loss if the model reports none."""
        sums = self._learner.state.extras["validation"]
        known = not math.isnan(sums["divisor"])
        loss = {"val_loss": mean_loss(sums, self._rows.plan.steps)} if known else {}
        return {**loss, "val_rows": sums["rows"]}

    def close(self) -> None:
        self._reader.close()

    def _count(self, verdict: Verdict) -> None:
        state = self._learner.state
        sums, here = state.extras["validation"], state.position
        sums["loss"] += verdict.loss
        sums["divisor"] += verdict.denominator
        sums["rows"] += verdict.rows
        last = here.step + 1 == self._rows.plan.steps
        state.position = (
            Position(here.epoch, Phase.CLOSE, 0) if last else Position(here.epoch, here.phase, here.step + 1)
        )


def no_sums() -> dict[str, float]:
    """The sums with which an epoch's validation begins."""
    return {"loss": 0.0, "divisor": 0.0, "rows": 0}
