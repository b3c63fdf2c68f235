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

from spark_elastic.handwritten.elastic_loop import run
from spark_elastic.handwritten.object_state import KerasState, ObjectState, State
from spark_elastic.horovod.keras.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from spark_elastic.protocol.types import HostUpdateResult
from spark_elastic.worker.session import WorkerNotificationManager, notification_manager

__all__ = ["HostUpdateResult", "WorkerNotificationManager", "notification_manager", "run"]
__all__ += ["KerasState", "ObjectState", "State"]
__all__ += ["CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]
