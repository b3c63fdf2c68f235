"""Callbacks for `model.fit` under Horovod's names, also those that update an elastic state. Training thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ALL, ProcessSet, rank, size
from spark_elastic.gradients.reduction import Average, ReduceOptions
from spark_elastic.horovod.keras.values import broadcast_variables
from spark_elastic.horovod.ops.operations import allreduce_arrays
from spark_elastic.runs.handlers import unwrap_variable
from spark_elastic.training.keras.state import SEED

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc] # untyped
    """Broadcasts model and optimizer of `root_rank` after the first batch of a fit. local_variables: variables that are
    not broadcast. device: not used."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._local = {id(variable) for variable in local_variables or ()}
        self._done = False

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast that variable."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        self._done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._done:
            return
        self._done = True
        own = self._local | {id(variable) for variable in self.model.metrics_variables}
        everything = [*self.model.variables, *self.model.optimizer.variables]
        # Random layers go on from their own seeds: with those of one rank, all would drop the same units.
        shared = {id(v): v for v in everything if id(v) not in own and not v.path.endswith(SEED)}
        broadcast_variables(list(shared.values()), self._root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the logs of an epoch over all ranks; place it before callbacks that read them. device: not used."""

    def __init__(self, device: str = "", process_set: ProcessSet = ALL) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        names = sorted(logs or ())
        if names:
            # Some metrics have a number for each class or threshold.
            own = [keras.ops.convert_to_numpy(logs[name]) for name in names]
            values = [np.array(value, np.float64, order="C") for value in own]
            allreduce_arrays(values, "metrics", ReduceOptions(Average, process_set=self._process_set))
            numbers = [value if value.ndim else float(value) for value in values]
            logs.update(zip(names, numbers, strict=True))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model with the best `monitor` so far, on rank 0. filepath: may be set later, as an attribute."""

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
        super().__init__(filepath or default, monitor, verbose, True, save_weights_only, mode, save_freq)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_epoch_end(epoch, logs)


DONE_BEFORE = "spark_elastic_batches"  # in a fit's params: batches of the epoch that earlier fits did
log = logging.getLogger(__name__)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc] # untyped
    """Sets the rate to `initial_lr` times `multiplier`, a number or f(epoch), from `start_epoch` to before `end_epoch`.

    With momentum correction (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 3) the velocities, which
    contain the former rate as a factor, are scaled to the new one. With an `elastic.UpdateBatchStateCallback` in the
    same fit, the batches of the epoch in earlier fits count.

    Args:
        staircase: change the rate at the beginning of epochs; else with each batch, for fractions of an epoch.
        steps_per_epoch: batches of an epoch; None: what fit knows.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidInput("initial_lr must be the learning rate before scaling; got None.")
        self._initial = float(initial_lr)
        self._multiplier = multiplier
        self._epochs = start_epoch, end_epoch
        self._staircase = staircase or not callable(multiplier)
        self._corrects = momentum_correction
        self._given_steps = self._steps = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._steps = self._given_steps or (self.params or {}).get("steps")  # another fit may have others
        if not self._staircase and not self._steps:
            raise InvalidInput(
                f"{type(self).__name__} needs steps_per_epoch: fit does not know it beforehand."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self._staircase:
            self._set(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._staircase:
            assert self._steps is not None
            before = (self.params or {}).get(DONE_BEFORE, 0)
            self._set(self._epoch + (before + batch) / self._steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def factor(self, epoch: float) -> float:
        return float(self._multiplier(epoch) if callable(self._multiplier) else self._multiplier)

    def _set(self, epoch: float) -> None:
        begin, end = self._epochs
        if self._epoch < begin or (end is not None and self._epoch >= end):
            return
        before, after = self._rate(), self._initial * self.factor(epoch)
        if before == after:
            return
        optimizer = self.model.optimizer
        try:
            optimizer.learning_rate = after
        except TypeError as error:
            raise InvalidInput(
                f"{type(self).__name__} sets the learning rate, which the optimizer takes from a schedule of its own: "
                "build it with a number."
            ) from error
        stepping = getattr(optimizer, "inner_optimizer", optimizer)  # a LossScaleOptimizer has one
        if self._corrects and before > 0 and getattr(stepping, "momentum", None):
            for velocity in getattr(stepping, "momentums", ()):
                # On torch, Keras's own product with a number is float32.
                velocity.assign(unwrap_variable(velocity) * (after / before))

    def _rate(self) -> float:
        return float(keras.ops.convert_to_tensor(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the rate from `initial_lr` / size to `initial_lr` in the first `warmup_epochs`, with the present size."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr, self._warm, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self._warmup = warmup_epochs
        self._verbose = verbose

    def _warm(self, epoch: float) -> float:
        assert self._steps is not None
        done = min((epoch + 1.0 / self._steps) / self._warmup, 1.0)
        return (done * (size() - 1) + 1) / size()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch == self._warmup - 1 and rank() == 0:
            log.warning("epoch %d: learning rate warm-up is over, at %g.", epoch + 1, self._rate())


# ---- of an elastic fit

END_OF_EPOCH = "the epoch is over"  # as `stop_training`: truthy, and no other callback sets it


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # untyped
    """Commits every `batches_per_commit` batches and at the end of epochs. It commits when the next batch or epoch
    begins: after all callbacks have updated the state, in whatever order."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._every = batches_per_commit
        self._seen = 0  # since the last commit
        self._first = 0  # batch of this call, which has several under steps_per_execution
        self._due = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._seen, self._due = 0, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._commit_if_due()
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._seen += batch + 1 - self._first
        self._due = self._seen >= self._every

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._commit_if_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._due = True

    def on_train_end(self, logs: Any = None) -> None:
        """Does not stop for a planned change: the next world would not know what has ended this fit."""
        if self._due and not self._state.in_mid_step():
            self._seen, self._due = 0, False
            self._state.make_commit()

    def _commit_if_due(self) -> None:
        if self._due:
            self._seen, self._due = 0, False
            self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.batch` to the batches done in the epoch, over all fits that it took; 0 between epochs. If a fit
    resumes within an epoch, the epoch ends after `steps_per_epoch` batches, those of earlier fits included.
    steps_per_epoch: None takes that of fit."""

    def __init__(self, state: Any, steps_per_epoch: int | None = None) -> None:
        super().__init__()
        self._state = state
        self._whole = steps_per_epoch
        self._before = 0  # done in this epoch by earlier fits

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self._state.batch
        self._share_progress()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch = self._before + batch + 1
        whole = self._whole or (self.params or {}).get("steps")
        if self._before and whole is not None and self._state.batch >= whole:
            self.model.stop_training = END_OF_EPOCH

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.batch = self._before = 0
        self._share_progress()
        if self.model.stop_training is END_OF_EPOCH:  # no other callback wants to stop
            self.model.stop_training = False

    def _share_progress(self) -> None:
        """Tell the other callbacks: Keras gives all callbacks of a fit the same dict of parameters."""
        if self.params is not None:
            self.params[DONE_BEFORE] = self._before


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.epoch` to the number of epochs done over all fits, whatever epoch a fit begins with."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.epoch += 1
