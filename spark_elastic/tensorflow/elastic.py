"""States of hand-written training in TensorFlow: the public name of `horovod.tensorflow.elastic`."""

from spark_elastic.horovod.tensorflow.elastic import (
    HostUpdateResult,
    ObjectState,
    State,
    TensorFlowKerasState,
    TensorFlowState,
    WorkerNotificationManager,
    notification_manager,
    run,
)

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "WorkerNotificationManager",
    "notification_manager",
    "run",
]
