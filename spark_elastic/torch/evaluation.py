"""Validation behind an epoch: every row counted once, whoever joins, leaves or dies meanwhile.

Its steps have positions and trailers as those of training do (R6), so that a drain does not wait for the epoch's end
and a broken step is taken again. Sums are part of the state. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from elastic_collectives import Group
from spark_elastic.data.loader import StepLoader
from spark_elastic.data.reader import Reader
from spark_elastic.data.readers import open_reader
from spark_elastic.protocol.types import Phase, Position, World
from spark_elastic.torch.columns import Columns
from spark_elastic.torch.metrics import Metrics
from spark_elastic.torch.objective import Objective
from spark_elastic.torch.snapshot import drawing_by
from spark_elastic.torch.torch_state import TorchState
from spark_elastic.torch.trailer import Trailer, Verdict, exchange
from spark_elastic.torch.train_spec import Rows, TrainSpec
from spark_elastic.torch.training import Share
from spark_elastic.worker.program import Session


class Evaluation:
    """Of one model on one data set. `run` takes the steps that are left in the position's epoch."""

    def __init__(
        self,
        spec: TrainSpec,
        rows: Rows,
        state: TorchState,
        objective: Objective,
        columns: Columns,
        metrics: Metrics,
        sealed: Callable[[World, int], None],
    ) -> None:
        """sealed: called when an exchange is complete, which says that the step before it is history (R1)."""
        self._spec, self._rows, self._state = spec, rows, state
        self._objective, self._columns, self._metrics = objective, columns, metrics
        self._sealed = sealed
        self._reader, self._loader = opened(spec, rows)

    def run(self, world: World, group: Group, session: Session) -> bool:
        """False where it stopped at a boundary."""
        model, here = self._state.model, self._state.position
        model.eval()
        try:
            with self._loader.steps(0, here.step, group.rank, group.size) as steps:
                for rows in steps:
                    verdict = self._step(group, self._columns.share(rows), session.membership_version())
                    session.tell(self._state.position)
                    self._sealed(world, verdict.version)
                    if verdict.version > world.version:
                        return False
        finally:
            model.train()
        return True

    def close(self) -> None:
        self._reader.close()

    def _step(self, group: Group, share: Share, version: int) -> Verdict:
        here, loss, denominator = self._state.position, 0.0, 0.0
        try:
            self._objective.begin(group, share)
            with torch.no_grad(), drawing_by(self._spec.seed, here.epoch, here.phase, here.step, group.rank):
                for part in share.micro_batches(self._spec.val_batch_size or self._spec.batch_size):
                    scored = self._objective(self._state.model, part)
                    self._metrics.add(scored, part.labels)
                    loss += float(scored.total)
                    denominator += scored.denominator
            self._metrics.gather(group)
            nothing = np.zeros(0, np.bool_)
            verdict = exchange(group, Trailer(here, version, 0, len(share), loss, denominator, nothing))
        except BaseException:
            self._metrics.drop()
            raise
        self._metrics.commit()
        sums = self._state.extras["validation"]
        sums["loss"] += verdict.loss
        sums["divisor"] += verdict.denominator or 1.0
        sums["rows"] += verdict.rows
        last = here.step + 1 == self._rows.plan.steps
        self._state.position = (
            Position(here.epoch, Phase.CLOSE, 0) if last else Position(here.epoch, here.phase, here.step + 1)
        )
        return verdict


def no_sums() -> dict[str, float]:
    """What an epoch's validation begins with."""
    return {"loss": 0.0, "divisor": 0.0, "rows": 0}


def opened(spec: TrainSpec, rows: Rows) -> tuple[Reader, StepLoader]:
    """Reader and loader of the columns that a training uses."""
    used = [c.name for c in spec.features] + [*spec.labels, *([spec.weight] if spec.weight else [])]
    columns = [rows.manifest.column(name) for name in dict.fromkeys(used)]
    reader = open_reader(spec.reader, rows.data, rows.manifest, [c.name for c in columns], spec.cache_bytes)
    return reader, StepLoader(rows.plan, reader, columns)
