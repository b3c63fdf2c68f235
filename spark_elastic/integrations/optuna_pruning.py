"""Lets Optuna end a fit whose numbers are worse than those of other trials.

The trial stays in the driver's process: workers need no Optuna and no storage of it. `report` is called in the thread
of progress, everything else in the caller's.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from spark_elastic.driver.discovery import JobHandle
from spark_elastic.errors import InvalidInput, JobCancelled

log = logging.getLogger("spark_elastic")


class TrialPruning:
    """Around the fit of a trial: `with TrialPruning(trial) as pruning`, and its two members among the parameters.

    After each epoch `monitor`, a number of validation or a metric of the history, is reported to the trial. If Optuna
    prunes it, the job is cancelled and the block raises `optuna.TrialPruned`. Of epochs shorter than a quarter of a
    second only some are reported.
    """

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        if monitor in ("loss", "rows"):
            raise InvalidInput(
                f"the progress of a training has {monitor!r} of single steps, which cannot be compared: set monitor to "
                "a number of validation or a metric."
            )
        self.handle = JobHandle()  # for the estimator's parameter `handle`
        self._trial, self._monitor = trial, monitor
        self._reported_epochs = 0
        self._missing = False
        self._pruned = False

    def report(self, metrics: Mapping[str, Any]) -> None:
        """For the estimator's parameter `on_progress`."""
        closed = int(metrics.get("closed", 0))
        if closed <= self._reported_epochs or self._pruned:
            return
        if self._monitor not in metrics:
            if not self._missing:
                log.warning("Optuna cannot prune by %r, which the epochs do not have.", self._monitor)
            self._missing = True
            return
        self._reported_epochs = closed
        self._trial.report(float(metrics[self._monitor]), closed - 1)
        if self._trial.should_prune():
            self._pruned = True
            self.handle.cancel(f"Optuna pruned trial {self._trial.number} after epoch {closed}")

    def __enter__(self) -> TrialPruning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pruned and isinstance(error, JobCancelled):
            raise importlib.import_module("optuna").TrialPruned(str(error)) from error
