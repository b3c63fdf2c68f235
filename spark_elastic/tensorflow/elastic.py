"""Elastic training of hand-written loops under Horovod's names: `hvd.elastic.run` and the states.

```
@hvd.elastic.run
def train(state): ...
train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0))
```
"""

from spark_elastic.handwritten.elastic_loop import run
from spark_elastic.handwritten.object_state import ObjectState, State, TensorFlowKerasState, TensorFlowState
from spark_elastic.protocol.types import HostUpdateResult
from spark_elastic.worker.session import WorkerNotificationManager, notification_manager

__all__ = ["HostUpdateResult", "WorkerNotificationManager", "notification_manager", "run"]
__all__ += ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState"]
