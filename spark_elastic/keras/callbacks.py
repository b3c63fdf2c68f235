"""Callbacks under Horovod's names, for `model.fit`. Training thread only."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from spark_elastic.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from spark_elastic.keras.values import broadcast_variables
from spark_elastic.ops.arrays import allreduce_arrays
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.topology import rank

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc] # untyped
    """Model and optimizer of `root_rank` are everybody's from the end of the first batch of a fit on.

    local_variables: those that are each rank's own. device: of no use here.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._local = {id(variable) for variable in local_variables or ()}
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._done:
            return
        self._done = True
        metrics = {id(variable) for variable in self.model.metrics_variables}
        everything = [*self.model.variables, *self.model.optimizer.variables]
        shared = {id(v): v for v in everything if id(v) not in metrics | self._local}
        broadcast_variables(list(shared.values()), self._root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The numbers of an epoch's end become the averages of all ranks; place it before callbacks that read them.

    device: of no use here.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        names = sorted(logs or ())
        if names:
            # Some metrics have a number for each class or threshold.
            values = [
                np.array(keras.ops.convert_to_numpy(logs[name]), np.float64, order="C") for name in names
            ]
            allreduce_arrays(values, "allreduce.metrics", process_set=self._process_set)
            logs.update(
                {n: value if value.ndim else float(value) for n, value in zip(names, values, strict=True)}
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Rank 0 keeps the model with the best `monitor` so far. filepath: may be set later, as an attribute."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | None = None,
    ) -> None:
        default = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(
            filepath or default,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_epoch_end(epoch, logs)
