"""Elastic training with `model.fit` under Horovod's names: the state, and callbacks that update its position.

```
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
callbacks = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
             hvd.elastic.CommitStateCallback(state)]

@hvd.elastic.run
def train(state):
    model.fit(data, initial_epoch=state.epoch, epochs=epochs, steps_per_epoch=steps, callbacks=callbacks)
```
"""

from __future__ import annotations

from typing import Any

import keras

from spark_elastic.handwritten.elastic_loop import run
from spark_elastic.handwritten.object_state import KerasState, ObjectState, State
from spark_elastic.horovod.keras.callbacks import DONE_BEFORE
from spark_elastic.protocol.types import HostUpdateResult
from spark_elastic.worker.session import WorkerNotificationManager, notification_manager

__all__ = [
    "CommitStateCallback",
    "HostUpdateResult",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "WorkerNotificationManager",
    "notification_manager",
    "run",
]

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
